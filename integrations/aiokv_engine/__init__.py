"""A small paged torch engine whose KV cache lives in aiokv's two tiers.

From the file to the answer:
- `weights`: where the file comes from; `byte_cursor`, `gguf`: reading it
- `tokenizer`, `chat`, `llama_gguf`, `model_file`: loading what is in it
- `llama`, `paged_attention`: computing; `selfcheck`: whether this CPU repeats its results
- `sampling`, `torch_worker`, `steps`, `scheduler`: serving; `serving`: all of it opened together
- `demo`, `demo_runs`, `demo_prompt`, `demo_talks`, `demo_texts`, `demo_report`: the command `aiokv demo`
- `server`: the command `aiokv serve`
"""
