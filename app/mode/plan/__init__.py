"""`mode=plan`: print device layout, batch sizes, a memory estimate and the engine command line, without starting a run."""
