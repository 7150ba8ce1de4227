"""GGUF files: our own memory-mapped reader, tensor names, config and quantized blocks.

`reader`, `split` and `ggml_types` import no torch, so that the front end can read a tokenizer out of a file quickly.
"""
