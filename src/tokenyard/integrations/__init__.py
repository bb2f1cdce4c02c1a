"""Adapters to FlashInfer, Hugging Face configs, torchtitan, Transformers and vLLM; each imports its library when used."""
