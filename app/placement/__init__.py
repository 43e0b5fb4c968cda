"""The two schedules: colocate (time-shared devices) and fully_async (disaggregated, bounded staleness)."""
