"""Tools as a user writes them, and some that cannot be used."""

import asyncio
import sqlite3
import threading
from typing import Any, Literal

RELEASE = threading.Event()  # lets hanging tools end
ASLEEP = threading.Event()  # an asynchronous tool waits
EVENTS: list[str] = []  # what instances did


def search(query: str, limit: int = 3, order: Literal["new", "old"] = "new", within: list[str] | None = None) -> str:
    """Search the web
    for pages.

    Args:
        query: Words to look for,
            in any order.
        limit (int): Pages at most.

    Returns:
        Titles.
    """
    return f"{limit} pages on {query}, {order}, {within}"


async def fetch(address: str) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"address": address, "text": "é"}


def fail(x: float) -> str:
    raise ZeroDivisionError(f"{x} by zero")


def leave() -> None:
    raise SystemExit(3)


async def leave_async() -> None:
    raise SystemExit(4)


async def cancelled() -> None:
    raise asyncio.CancelledError


def hang() -> str:
    RELEASE.wait(60)
    return "too late"


async def sleep() -> None:
    ASLEEP.set()
    await asyncio.sleep(60)


def circular() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def untyped(query, limit: int = 3):
    return query


def of_bytes(data: bytes) -> str:
    return ""


def of_anything(*words: str) -> str:
    return ""


def of_unknown(x: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    return ""


class Notes:
    """An instance an episode, with an object that is bound to its thread."""

    def __init__(self) -> None:
        EVENTS.append("made")
        self._rows = sqlite3.connect(":memory:")
        self._rows.execute("create table notes (text)")

    def write(self, text: str) -> int:
        """Write a note."""
        self._rows.execute("insert into notes values (?)", (text,))
        return len(self.read())

    async def read_later(self) -> int:
        await asyncio.sleep(0)
        return 7

    def read(self) -> list[str]:
        """Read all notes."""
        return [text for (text,) in self._rows.execute("select text from notes")]

    @staticmethod
    def upper(text: str) -> str:
        return text.upper()

    def close(self) -> None:
        self._rows.close()
        EVENTS.append("closed")

    def _private(self, x: int) -> None: ...


class NeedsKey:
    def __init__(self, key: str) -> None: ...

    def open(self) -> str:
        return ""


class Nothing:
    def _hidden(self) -> None: ...


class UntypedMethod:
    def open(self, door) -> str:
        return ""
