"""Adapters to FlashInfer, Hugging Face configs, torchtitan, Transformers, vLLM. Each imports its library when used."""
