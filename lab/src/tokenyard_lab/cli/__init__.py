"""The lab's commands of `tokenyard`: `run`, `eval`, `bench` and `soak`, each in a module of its name."""
