"""Adapters to FlashInfer, Hugging Face configs, Transformers and vLLM. Each imports its library only when used."""
