"""Adapters to FlashInfer, Hugging Face configs, torchtitan, Transformers and vLLM, each imported when first used."""
