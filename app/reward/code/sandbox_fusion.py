"""Programs on a Sandbox Fusion server (https://github.com/bytedance/SandboxFusion): POST /run_code."""

import json
import urllib.error
import urllib.request
from typing import Any

from app.reward.code.sandbox import RUNNER, Output, SandboxError, job_text

NETWORK_TIMEOUT_S = 3.0  # beyond the program's own


class SandboxFusion:
    """Runs programs on a server, with its limits of processes and files.

    Args:
        url: Of the server, without /run_code.
        memory: Of a program, in bytes.
    """

    def __init__(self, url: str, memory: int) -> None:
        self._url = url.rstrip("/")
        self._memory = memory
        self.description = f"{self._url}: a Sandbox Fusion server, which isolates programs itself"

    def run(self, job: dict[str, Any], stdin: str, timeout_s: float) -> Output:
        """See `Sandbox.run`.

        Raises:
            SandboxError: The server does not answer, or not with a result.
        """
        request = {
            "language": "python",
            "code": RUNNER,
            "stdin": job_text({**job, "limits": None}, stdin).decode(),
            "run_timeout": timeout_s,
            "memory_limit_MB": self._memory >> 20,
        }
        result = self._post("/run_code", request, timeout_s + NETWORK_TIMEOUT_S).get("run_result") or {}
        text = str(result.get("stdout") or "").encode(errors="replace")
        return Output(text, result.get("status") == "Finished" and result.get("return_code") == 0)

    def _post(self, path: str, value: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        body = json.dumps(value).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                answer = json.load(reply)
        except (OSError, ValueError) as error:
            raise SandboxError(f"{self._url}{path}: {error}") from error
        if not isinstance(answer, dict) or answer.get("status") == "SandboxError":
            raise SandboxError(f"{self._url}{path} returned {str(answer)[:100]!r}")
        return answer
