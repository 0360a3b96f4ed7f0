"""A child as `bench.peers.child` speaks to it: it counts up from each prompt's length. Told in the prompt, it fails."""

import json
import sys

print("a library's greeting\nonednn_verbose,v1,info,cpu,isa:Intel AVX2", file=sys.stderr, flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["call"] == "quit":
        break
    if message["call"] == "load":
        if message["checkpoint"] == "broken":
            sys.exit("there is no such checkpoint")
        answer = {"version": f"1.0 with {message['threads']} threads", "instructions": ["in its own words"]}
    elif message["prompts"] == [[13]]:
        answer = {"error": "unlucky"}
    elif message["prompts"] == [[14]]:
        sys.exit("the child died")
    else:
        first = [len(prompt) for prompt in message["prompts"]]
        answer = {"outputs": [list(range(n, n + message["output_tokens"])) for n in first], "seconds": 0.25}
    print(json.dumps(answer), flush=True)
