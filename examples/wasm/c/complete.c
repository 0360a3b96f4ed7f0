/* Continues a text: its arguments are a JSON string, and so is what it returns. */
#include "weft.h"

WEFT_EXPORT(run) void run(void) {
  weft_bytes args = {0}, prompt = {0}, out = {0}, text = {0}, result = {0};
  uint32_t size = weft_args(NULL, 0);
  weft_reserve(&args, size);
  args.size = weft_args(args.data, size);
  if (!weft_unquote(&prompt, args.data, args.size)) weft_fail("the arguments must be a JSON string", 35);

  weft_log(&out, 1, "tokenizing", 10);
  uint32_t tokens = weft_tokenize(&out, 1, (const char *)prompt.data, prompt.size);
  weft_event event = weft_next(&out, tokens);
  uint32_t bytes;
  const uint8_t *ids = weft_blob(&event, 0, &bytes);

  /* Three commands, one exchange: nothing waits until the text is wanted. */
  uint32_t seq = weft_seq_open(&out, 0);
  weft_seq_append(&out, seq, ids, bytes);
  uint32_t call =
      weft_seq_generate(&out, seq, "{\"sampling\": {\"temperature\": 0}, \"stop\": {\"max_tokens\": 16}}");
  for (event = weft_next(&out, call); event.kind == WEFT_PART; event = weft_next(&out, call)) {
    const uint8_t *piece = weft_blob(&event, 1, &size);
    weft_put(&text, piece, size);
  }
  weft_seq_release(&out, seq);
  weft_exchange(out.data, out.size, 0);

  weft_quote(&result, text.data, text.size);
  weft_result(result.data, result.size);
}
