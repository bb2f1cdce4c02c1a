"""Tools that measure and demonstrate the layer: benchmarks, evaluation, soaks, the shipped model, generated tables."""
