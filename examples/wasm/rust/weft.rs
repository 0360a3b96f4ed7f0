//! Weft programs in Rust: the functions of the host, and packers for its messages (docs/wasm.md describes both). It has
//! the calls that answers of text need, and `Command` for all others.
//!
//! A module exports `run`, which takes nothing and returns nothing (or an `i32`: not 0 has failed).
#![allow(dead_code)]

mod host {
    #[link(wasm_import_module = "weft")]
    extern "C" {
        pub fn exchange(commands: *const u8, size: usize, timeout_s: f64) -> usize;
        pub fn read(to: *mut u8, capacity: usize) -> usize;
        pub fn args(to: *mut u8, capacity: usize) -> usize;
        pub fn result(json: *const u8, size: usize);
        pub fn fail(message: *const u8, size: usize) -> !;
        pub fn now() -> f64;
    }
}

/// The run's arguments, as JSON.
pub fn args() -> String {
    unsafe {
        let mut bytes = vec![0; host::args(core::ptr::null_mut(), 0)];
        host::args(bytes.as_mut_ptr(), bytes.len());
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// What the run returns, as JSON. The last one counts; without any it is null.
pub fn result(json: &str) {
    unsafe { host::result(json.as_ptr(), json.len()) }
}

/// Ends the run as failed.
pub fn fail(message: &str) -> ! {
    unsafe { host::fail(message.as_ptr(), message.len()) }
}

/// Seconds since 1970; never goes back.
pub fn now() -> f64 {
    unsafe { host::now() }
}

pub const LOG: u8 = 1;
pub const SLEEP: u8 = 4;
pub const TOKENIZE: u8 = 20;
pub const SEQ_OPEN: u8 = 30;
pub const SEQ_APPEND: u8 = 31;
pub const SEQ_GENERATE: u8 = 32;
pub const SEQ_RELEASE: u8 = 38;

/// One command: its numbers, then its blobs.
pub struct Command {
    head: Vec<u8>,
    sizes: Vec<u8>,
    blobs: Vec<u8>,
}

impl Command {
    pub fn new(op: u8, call: u32) -> Command {
        let mut head = vec![op];
        head.extend_from_slice(&call.to_le_bytes());
        Command { head, sizes: Vec::new(), blobs: Vec::new() }
    }
    pub fn u8(mut self, value: u8) -> Command {
        self.head.push(value);
        self
    }
    pub fn u32(mut self, value: u32) -> Command {
        self.head.extend_from_slice(&value.to_le_bytes());
        self
    }
    pub fn f64(mut self, value: f64) -> Command {
        self.head.extend_from_slice(&value.to_le_bytes());
        self
    }
    pub fn blob(mut self, data: &[u8]) -> Command {
        self.sizes.extend_from_slice(&(data.len() as u32).to_le_bytes());
        self.blobs.extend_from_slice(data);
        self
    }
}

/// An event of a call.
pub struct Event {
    pub is_part: bool,
    pub blobs: Vec<Vec<u8>>,
}

/// The way to the host: commands queue up and leave with the next wait.
#[derive(Default)]
pub struct Channel {
    last: u32,
    outbox: Vec<u8>,
    inbox: Vec<u8>,
}

impl Channel {
    /// A number for a call or a handle: one counter, never 0.
    pub fn number(&mut self) -> u32 {
        self.last += 1;
        self.last
    }

    pub fn push(&mut self, command: Command) {
        let size = command.head.len() + command.sizes.len() + command.blobs.len();
        self.outbox.extend_from_slice(&(size as u32).to_le_bytes());
        self.outbox.extend_from_slice(&command.head);
        self.outbox.extend_from_slice(&command.sizes);
        self.outbox.extend_from_slice(&command.blobs);
    }

    /// Hands over what is queued, and takes in events; waits for some if there are none (negative: without end).
    pub fn exchange(&mut self, timeout_s: f64) {
        unsafe {
            let size = host::exchange(self.outbox.as_ptr(), self.outbox.len(), timeout_s);
            self.outbox.clear();
            let start = self.inbox.len();
            self.inbox.resize(start + size, 0);
            host::read(self.inbox.as_mut_ptr().add(start), size);
        }
    }

    /// The next event of a call; those of others are dropped. An error of any call ends the run.
    pub fn next(&mut self, call: u32) -> Event {
        loop {
            while self.inbox.is_empty() {
                self.exchange(-1.0);
            }
            let word = |at: usize| u32::from_le_bytes(self.inbox[at..at + 4].try_into().unwrap());
            let (end, kind, number, count) = (4 + word(0) as usize, self.inbox[4], word(5), self.inbox[9] as usize);
            let mut at = 10 + 4 * count;
            let mut blobs = Vec::new();
            for i in 0..count {
                let size = word(10 + 4 * i) as usize;
                blobs.push(self.inbox[at..at + size].to_vec());
                at += size;
            }
            self.inbox.drain(..end);
            if kind == 1 {
                fail(&String::from_utf8_lossy(blobs.get(1).map_or(&[][..], |b| &b[..])));
            }
            if number == call {
                return Event { is_part: kind == 2, blobs };
            }
        }
    }

    pub fn log(&mut self, text: &str) {
        self.push(Command::new(LOG, 0).u8(1).blob(text.as_bytes()));
    }

    /// Token ids, packed int32.
    pub fn tokenize(&mut self, text: &str) -> Vec<u8> {
        let call = self.number();
        self.push(Command::new(TOKENIZE, call).u8(1).blob(text.as_bytes()));
        self.next(call).blobs.swap_remove(0)
    }

    // Calls without an answer carry the number of what they are about: an error says which that was.

    pub fn open(&mut self) -> u32 {
        let seq = self.number();
        self.push(Command::new(SEQ_OPEN, seq).u32(seq).u32(0));
        seq
    }

    pub fn append(&mut self, seq: u32, tokens: &[u8]) {
        self.push(Command::new(SEQ_APPEND, seq).u32(seq).blob(tokens));
    }

    /// Answered in parts of (token ids; text).
    pub fn generate(&mut self, seq: u32, about: &str) -> u32 {
        let call = self.number();
        self.push(Command::new(SEQ_GENERATE, call).u32(seq).u8(1).blob(about.as_bytes()));
        call
    }

    pub fn release(&mut self, seq: u32) {
        self.push(Command::new(SEQ_RELEASE, seq).u32(seq));
    }
}

/// A text as a JSON string.
pub fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if (c as u32) < 0x20 => out += &format!("\\u{:04x}", c as u32),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A JSON string without \u escapes; `None` where it is none.
pub fn unquote(json: &str) -> Option<String> {
    let inner = json.strip_prefix('"')?.strip_suffix('"')?;
    let mut out = String::new();
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        out.push(match c {
            '\\' => match chars.next()? {
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                'u' => return None,
                other => other,
            },
            c => c,
        });
    }
    Some(out)
}
