"""Times transformers + torch for the benchmarks; runs in an environment of its own (`make peer`), which has no JAX.

Reads one JSON request a line from standard input, {"prefill": n} or {"decode": n, "steps": k}; answers {"seconds": s}.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Serve requests until standard input closes."""
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        length = request.get("prefill") or request["decode"]
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
        with torch.inference_mode():
            start = time.perf_counter()
            out = model(ids, use_cache=True, logits_to_keep=1)
            if "decode" in request:
                token, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                start = time.perf_counter()
                for _ in range(request["steps"]):
                    out = model(token, past_key_values=cache, use_cache=True)
                    token = out.logits[:, -1].argmax(-1, keepdim=True)
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
