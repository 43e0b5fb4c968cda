"""From a composed configuration to workers: the inputs of a run, their checks, its folder, its processes."""
