"""The two schedules: colocate (time-shared devices) and fully_async (disaggregated, bounded staleness).

`staleness.py` admits groups, `producer.py` drops those that became too stale. `placement.in_flight` acts where a sync
pauses the engines: `app/rollout/engine/host.py`.
"""
