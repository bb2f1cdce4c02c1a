"""The model that ships with tokenyard: a small Qwen3-MoE that solves arithmetic word problems, step by step."""
