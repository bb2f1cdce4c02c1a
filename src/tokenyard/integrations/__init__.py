"""Adapters to FlashInfer, Hugging Face, torchtitan, Transformers and vLLM. Each imports its library only when used."""
