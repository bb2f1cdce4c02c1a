"""The shipped model, served by vLLM with the plugin on two ranks: `make run-vllm`."""
