"""Adapters to FlashInfer, Hugging Face configs, torchtitan, Transformers and vLLM. Each imports its library only when used."""
