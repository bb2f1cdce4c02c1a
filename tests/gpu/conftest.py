"""Settings that CUDA reads when it starts: made before any test asks for a GPU."""

from tokenyard.group.devices import prepare_threads

prepare_threads("cuda")
