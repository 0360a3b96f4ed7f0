/* Weft programs in C: the functions of the host, and packers for its messages. docs/wasm.md describes both; this header
 * has the calls that answers of text need, and `weft_begin`, `weft_blob` and `weft_end` for all others.
 *
 * A module exports `run`, which takes nothing and returns nothing (or an int: not 0 has failed). */
#ifndef WEFT_H
#define WEFT_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define WEFT_IMPORT(name) __attribute__((import_module("weft"), import_name(#name)))
#define WEFT_EXPORT(name) __attribute__((export_name(#name)))

/* Hands commands over; waits `timeout_s` for events (negative: without end). Returns their size in bytes. */
WEFT_IMPORT(exchange) extern uint32_t weft_exchange(const void *commands, uint32_t size, double timeout_s);
/* Copies events of the last exchange that were not read yet; returns how many bytes. */
WEFT_IMPORT(read) extern uint32_t weft_read(void *to, uint32_t capacity);
/* Copies the run's arguments (JSON); returns the size they have. */
WEFT_IMPORT(args) extern uint32_t weft_args(void *to, uint32_t capacity);
/* What the run returns (JSON). The last one counts; without any it is null. */
WEFT_IMPORT(result) extern void weft_result(const void *json, uint32_t size);
/* Ends the run as failed, with a message. Does not return. */
WEFT_IMPORT(fail) extern void weft_fail(const char *message, uint32_t size);
/* Seconds since 1970; never goes back. */
WEFT_IMPORT(now) extern double weft_now(void);

enum {
  WEFT_LOG = 1, WEFT_SEND = 2, WEFT_RECEIVE = 3, WEFT_SLEEP = 4, WEFT_TOKENIZE = 20, WEFT_DETOKENIZE = 21,
  WEFT_SEQ_OPEN = 30, WEFT_SEQ_APPEND = 31, WEFT_SEQ_GENERATE = 32, WEFT_SEQ_RELEASE = 38
};
enum { WEFT_RESULT = 0, WEFT_ERROR = 1, WEFT_PART = 2 };

typedef struct { uint8_t *data; uint32_t size, capacity; } weft_bytes;

static inline void weft_reserve(weft_bytes *out, uint32_t more) {
  if (out->size + more <= out->capacity) return;
  out->capacity = (out->size + more) * 2;
  out->data = realloc(out->data, out->capacity);
  if (out->data == NULL) weft_fail("out of memory", 13);
}

static inline void weft_put(weft_bytes *out, const void *data, uint32_t size) {
  weft_reserve(out, size);
  if (size) memcpy(out->data + out->size, data, size);
  out->size += size;
}

static inline void weft_put_u8(weft_bytes *out, uint8_t value) { weft_put(out, &value, 1); }
static inline void weft_put_u32(weft_bytes *out, uint32_t value) { weft_put(out, &value, 4); }

/* ---- commands: begin, the numbers, the sizes of the blobs, the blobs, end */

/* Returns where the command begins, for `weft_end`. */
static inline uint32_t weft_begin(weft_bytes *out, uint8_t op, uint32_t call) {
  uint32_t start = out->size;
  weft_put_u32(out, 0);
  weft_put_u8(out, op);
  weft_put_u32(out, call);
  return start;
}

static inline void weft_end(weft_bytes *out, uint32_t start) {
  uint32_t size = out->size - start - 4;
  memcpy(out->data + start, &size, 4);
}

/* Numbers for calls and handles: one counter, never 0. */
static inline uint32_t weft_number(void) {
  static uint32_t last;
  return ++last;
}

static inline void weft_log(weft_bytes *out, uint8_t level, const char *text, uint32_t size) {
  uint32_t at = weft_begin(out, WEFT_LOG, 0);
  weft_put_u8(out, level);
  weft_put_u32(out, size);
  weft_put(out, text, size);
  weft_end(out, at);
}

/* Answered by token ids, int32. */
static inline uint32_t weft_tokenize(weft_bytes *out, int with_special, const char *text, uint32_t size) {
  uint32_t call = weft_number(), at = weft_begin(out, WEFT_TOKENIZE, call);
  weft_put_u8(out, with_special != 0);
  weft_put_u32(out, size);
  weft_put(out, text, size);
  weft_end(out, at);
  return call;
}

/* Calls without an answer carry the number of what they are about: an error says which that was. */
static inline uint32_t weft_seq_open(weft_bytes *out, int32_t priority) {
  uint32_t seq = weft_number(), at = weft_begin(out, WEFT_SEQ_OPEN, seq);
  weft_put_u32(out, seq);
  weft_put(out, &priority, 4);
  weft_end(out, at);
  return seq;
}

static inline void weft_seq_append(weft_bytes *out, uint32_t seq, const void *ids, uint32_t bytes) {
  uint32_t at = weft_begin(out, WEFT_SEQ_APPEND, seq);
  weft_put_u32(out, seq);
  weft_put_u32(out, bytes);
  weft_put(out, ids, bytes);
  weft_end(out, at);
}

/* Answered in parts of (token ids; text). `json`: {"sampling": {...}, "stop": {...}}. */
static inline uint32_t weft_seq_generate(weft_bytes *out, uint32_t seq, const char *json) {
  uint32_t size = (uint32_t)strlen(json), call = weft_number(), at = weft_begin(out, WEFT_SEQ_GENERATE, call);
  weft_put_u32(out, seq);
  weft_put_u8(out, 1);
  weft_put_u32(out, size);
  weft_put(out, json, size);
  weft_end(out, at);
  return call;
}

static inline void weft_seq_release(weft_bytes *out, uint32_t seq) {
  uint32_t at = weft_begin(out, WEFT_SEQ_RELEASE, seq);
  weft_put_u32(out, seq);
  weft_end(out, at);
}

/* ---- events */

typedef struct { uint8_t kind; uint32_t call; uint8_t count; const uint8_t *sizes, *blobs; } weft_event;

static inline uint32_t weft_u32(const uint8_t *at) {
  uint32_t value;
  memcpy(&value, at, 4);
  return value;
}

/* The blob of a number; its size goes to `size`. */
static inline const uint8_t *weft_blob(const weft_event *event, uint8_t number, uint32_t *size) {
  const uint8_t *at = event->blobs;
  *size = 0;
  if (number >= event->count) return at;
  for (uint8_t i = 0; i < number; i++) at += weft_u32(event->sizes + 4 * i);
  *size = weft_u32(event->sizes + 4 * number);
  return at;
}

/* Events that were read and not looked at yet. */
static weft_bytes weft_inbox;
static uint32_t weft_seen;

/* The next event of `call`; those of other calls are dropped. Hands over what is in `out` first. Fails the run with the
 * message of an error, whichever call it is about. What the event points to lives until the next one. */
static inline weft_event weft_next(weft_bytes *out, uint32_t call) {
  for (;;) {
    while (weft_seen == weft_inbox.size) {
      uint32_t size = weft_exchange(out->data, out->size, -1.0);
      out->size = weft_inbox.size = weft_seen = 0;
      weft_reserve(&weft_inbox, size);
      weft_inbox.size = weft_read(weft_inbox.data, size);
    }
    const uint8_t *at = weft_inbox.data + weft_seen;
    weft_seen += 4 + weft_u32(at);
    weft_event event = {at[4], weft_u32(at + 5), at[9], at + 10, at + 10 + 4 * at[9]};
    if (event.kind == WEFT_ERROR) {
      uint32_t size;
      const uint8_t *message = weft_blob(&event, 1, &size);
      weft_fail((const char *)message, size);
    }
    if (event.call == call) return event;
  }
}

/* ---- JSON strings, which is all that small programs need of JSON */

/* Writes a text as a JSON string. */
static inline void weft_quote(weft_bytes *out, const void *text, uint32_t size) {
  static const char digits[] = "0123456789abcdef";
  const uint8_t *from = text;
  weft_put_u8(out, '"');
  for (uint32_t i = 0; i < size; i++) {
    uint8_t c = from[i];
    if (c == '"' || c == '\\') weft_put_u8(out, '\\');
    if (c < 0x20) {
      weft_put(out, "\\u00", 4);
      weft_put_u8(out, (uint8_t)digits[c >> 4]);
      c = (uint8_t)digits[c & 15];
    }
    weft_put_u8(out, c);
  }
  weft_put_u8(out, '"');
}

/* Reads a JSON string without \u escapes; 0 where it is none. */
static inline int weft_unquote(weft_bytes *out, const void *json, uint32_t size) {
  const uint8_t *from = json;
  if (size < 2 || from[0] != '"' || from[size - 1] != '"') return 0;
  for (uint32_t i = 1; i + 1 < size; i++) {
    uint8_t c = from[i];
    if (c == '\\') {
      c = from[++i];
      if (c == 'u') return 0;
      c = c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c == 'b' ? '\b' : c == 'f' ? '\f' : c;
    }
    weft_put_u8(out, c);
  }
  return 1;
}

#endif
