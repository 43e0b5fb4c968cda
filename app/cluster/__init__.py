"""Ray and the machines of a run: cluster, placement group, actors, memory monitor, process reaper."""
