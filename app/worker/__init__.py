"""Worker processes that can be killed: where rewards and environments run, since their code may hang or die.

    WorkerPool ─→ RemoteWorker ─→ WorkerProcess ══ pipe, a JSON object a line ══ __main__ ─→ handler.load(…).serve
      Job ⇄ messages

A handler is a module: `load(settings)` returns an object with `info`, JSON values for the driver, and `serve(pipe)`,
which runs jobs until the driver closes the pipe. What a job's messages hold is between the handler and the pool's
owner. What runs in a worker (`__main__`, `process`, `wire`) needs the standard library alone, since its interpreter may
have other packages.
"""
