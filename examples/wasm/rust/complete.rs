//! Continues a text: its arguments are a JSON string, and so is what it returns.
mod weft;

#[no_mangle]
pub extern "C" fn run() {
    let prompt = weft::unquote(&weft::args()).unwrap_or_else(|| weft::fail("the arguments must be a JSON string"));
    let mut channel = weft::Channel::default();
    channel.log("tokenizing");
    let tokens = channel.tokenize(&prompt);

    // Three commands, one exchange: nothing waits until the text is wanted.
    let seq = channel.open();
    channel.append(seq, &tokens);
    let call = channel.generate(seq, r#"{"sampling": {"temperature": 0}, "stop": {"max_tokens": 16}}"#);
    let mut text = Vec::new();
    loop {
        let event = channel.next(call);
        if !event.is_part {
            break;
        }
        text.extend_from_slice(&event.blobs[1]);
    }
    channel.release(seq);
    channel.exchange(0.0);
    weft::result(&weft::quote(&String::from_utf8_lossy(&text)));
}
