"""Right programs in the forms that models write them, and tests in the forms that data sets have: each scores 1."""

import time
from typing import Any

import pytest

from app.reward.code import last_block
from app.reward.code.judge import Judge
from app.reward.code.row_tests import read_tests
from app.reward.code.sandbox import LocalSandbox, unavailable

VECTOR = """class V:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __add__(self, other):
        return V(self.x + other.x, self.y + other.y)
    def __eq__(self, other):
        return (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other):
        return (self.x, self.y) < (other.x, other.y)
    def __str__(self):
        return f"<{self.x} {self.y}>"
    def __getitem__(self, index):
        return (self.x, self.y)[index]
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.x = 0
"""
ASSERTED: dict[str, tuple[str, str]] = {
    "values of the standard library": (
        "from collections import deque\nfrom datetime import date, timedelta, timezone, datetime\n"
        "from decimal import Decimal\nfrom fractions import Fraction\n"
        "assert f(0) == Fraction(1, 2) and f(1) == Decimal('1.50') and f(2) == range(3) and f(3) == deque([1, 2])\n"
        "assert f(4) == date(2024, 2, 29) and f(5) == timedelta(hours=1)\n"
        "assert f(6) == datetime(2024, 1, 1, tzinfo=timezone.utc) and f(7) == bytearray(b'x')",
        "from collections import *\nfrom datetime import *\nfrom decimal import *\nfrom fractions import *\n"
        "def f(x):\n    return [Fraction(2, 4), Decimal('1.5'), range(0, 3), deque((1, 2)), date(2024, 2, 29),\n"
        "        timedelta(minutes=60), datetime(2024, 1, 1, tzinfo=timezone.utc), bytearray(b'x')][x]\n",
    ),
    "dictionaries and tuples of other classes": (
        "assert f('aab') == {'a': 2, 'b': 1} and g() == (1, 2) and h(1) == {1: [1]}",
        "from collections import *\nf = Counter\ndef g():\n    return namedtuple('P', 'x y')(1, 2)\n"
        "def h(x):\n    found = defaultdict(list)\n    found[x].append(x)\n    return found\n",
    ),
    "arguments of the standard library": (
        "from collections import Counter, OrderedDict, defaultdict, deque\nfrom fractions import Fraction\n"
        "assert f(Counter('aab')) == 3 and f(deque([1, 2])) == 2 and f(OrderedDict(a=1)) == 1\n"
        "assert f(defaultdict(list)) == 0 and g(Fraction(1, 2)) == 1 and g(2**20000) == 2**20001",
        "def f(x):\n    return sum(x.values()) if hasattr(x, 'values') else len(x)\ndef g(x):\n    return x * 2\n",
    ),
    "functions as arguments": (
        "def twice(x):\n    return x * 2\n"
        "assert f(lambda x: x + 1, 3) == 4 and f(twice, 3) == 6 and f(str, 3) == '3' and f(abs, -3) == 3\n"
        "assert f(lambda x: f(twice, x) + 1, 3) == 7",
        "def f(function, x):\n    return function(x)\n",
    ),
    "an exception of a function that was an argument": (
        "def fail(x):\n    raise LookupError('deep')\nassert f(fail) == 'deep'",
        "def f(function):\n    try:\n        function(1)\n"
        "    except LookupError as error:\n        return str(error)\n",
    ),
    "arguments that change": (
        "a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]\nm = [[1, 2], [3, 4]]\ng(m)\nassert m == [[3, 1], [4, 2]]\n"
        "d = {'x': 1}\nh(d)\nassert d == {'x': 2}",
        "def f(a):\n    a.sort()\ndef g(m):\n    m[:] = [list(row) for row in zip(*m[::-1])]\n"
        "def h(d):\n    d['x'] += 1\n",
    ),
    "exceptions": (
        "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'below 0'\n"
        "try:\n    g()\n    assert False\nexcept Empty as error:\n    assert isinstance(error, LookupError)\n"
        "try:\n    h()\n    assert False\nexcept SystemExit as error:\n    assert error.args == (3,)",
        "import sys\nclass Empty(KeyError):\n    pass\ndef f(x):\n    raise ValueError('below 0')\n"
        "def g():\n    raise Empty\ndef h():\n    sys.exit(3)\n",
    ),
    "a bare except": ("try:\n    x = f(1)\nexcept:\n    assert False\nassert x == 2", "def f(x):\n    return x + 1\n"),
    "objects": (
        "assert V(1, 2) + V(3, 4) == V(4, 6) and V(1, 2) != V(1, 3) and V(0, 1) < V(1, 0)\n"
        "assert str(V(1, 2)) == '<1 2>' and f'{V(3, 4)}' == '<3 4>' and V(1, 2)[1] == 2\n"
        "v = V(1, 2)\nv.x = 5\nassert v.x == 5 and isinstance(v, V)\n"
        "with v as w:\n    assert w.y == 2\nassert v.x == 0",
        VECTOR,
    ),
    "iterators": (
        "g = f(3)\nassert next(g) == 0 and list(g) == [1, 2] and 2 in f(3) and sum(f(4)) == 6 and [*f(2)] == [0, 1]\n"
        "import itertools\nassert list(itertools.islice(endless(), 3)) == [0, 1, 2]",
        "import itertools\ndef f(n):\n    yield from range(n)\ndef endless():\n    return itertools.count()\n",
    ),
    "class attributes and static methods": (
        "assert A.k == 5 and A.twice(4) == 8 and LIMIT == 3 and kind(1) is int",
        "LIMIT = 3\nkind = type\nclass A:\n    k = 5\n    @staticmethod\n    def twice(x):\n        return 2 * x\n",
    ),
    "long numbers": ("assert f() == 10**5000 and f() % 7 == 2", "def f():\n    return 10**5000\n"),
    "a loop": ("for i in range(300):\n    assert f(i) == i + 1", "def f(x):\n    return x + 1\n"),
    "a program that prints, reads its name and has threads": (
        "assert f(3) == [0, 2, 4]",
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\nprint('debug')\n"
        "def f(n):\n    print('x')\n    with ThreadPoolExecutor(2) as pool:\n"
        "        return list(pool.map(lambda x: 2 * x, range(n)))\n"
        "if __name__ == '__main__':\n    print(f(int(input())))\n",
    ),
    "a coroutine": (
        "assert f(2) == 3",
        "import asyncio\nasync def g(x):\n    await asyncio.sleep(0)\n    return x + 1\n"
        "def f(x):\n    return asyncio.run(g(x))\n",
    ),
    "a class of a library's with a method": (
        "s = Stack()\ns.append(3)\nassert s.peek() == 3",
        "from collections import deque\nclass Stack(deque):\n    def peek(self):\n        return self[-1]\n",
    ),
    "a limit of the recursion": (
        "assert f(20000) == 20000",
        "import resource, sys\nsys.setrecursionlimit(10**6)\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 25, -1))\n"
        "def f(n):\n    return n and 1 + f(n - 1)\n",
    ),
}  # fmt: skip
UNITTEST = """import io, unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(add(1, 2), 3)
        with self.assertRaises(TypeError):
            add()
def check(candidate):
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(T)
    assert unittest.TextTestRunner(stream=io.StringIO()).run(tests).wasSuccessful()
"""
SOLUTION = """class Solution:
    def two(self, nums: List[int], target: int) -> Optional[List[int]]:
        seen = defaultdict(int)
        for index, number in enumerate(nums):
            if target - number in seen:
                return [seen[target - number], index]
            seen[number] = index
"""
STACK = """import sys, threading
sys.setrecursionlimit(1 << 20)
threading.stack_size(1 << 26)
def main():
    def depth(n):
        return n and 1 + depth(n - 1)
    print(depth(int(sys.stdin.readline())))
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "unittest": ({"test": UNITTEST, "entry_point": "add"}, "def add(a, b):\n    return a + b\n"),
    "a builtin's name": (
        {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "sum"},
        "def sum(a, b):\n    return a + b\n",
    ),
    "LeetCode without its imports": ({"inputs": [[[2, 7, 11], 9]], "outputs": [[0, 1]], "fn_name": "two"}, SOLUTION),
    "a thread with a large stack": ({"inputs": ["9000"], "outputs": ["9000"]}, STACK),
    "a long input": (
        {"inputs": [f"{'1 ' * 200_000}\n"], "outputs": ["200000"]},
        "print(sum(map(int, input().split())))",
    ),
    "a long input in one read": (
        {"inputs": ["1 " * 200_000], "outputs": ["200000"]},
        "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))",
    ),
    "a result that equals a number": (
        {"inputs": [[4]], "outputs": [2], "fn_name": "f"},
        "from fractions import Fraction\ndef f(x):\n    return Fraction(x, 2)\n",
    ),
}


@pytest.fixture
def judge() -> Judge:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    return Judge(LocalSandbox(512 << 20), stop_early=True, timeout_s=60.0)


@pytest.mark.parametrize("name", ASSERTED)
def test_a_right_program_passes_asserts(judge: Judge, name: str) -> None:
    test, program = ASSERTED[name]
    assert judge.passed(program, read_tests({"test_list": [test]})) == 1


@pytest.mark.parametrize("name", ROWS)
def test_a_right_program_passes_the_tests_of_a_row(judge: Judge, name: str) -> None:
    row, program = ROWS[name]
    assert judge.passed(program, read_tests(row)) == 1


PROGRAM = "def f(x):\n    return x\n"
SCRIPT = "print(int(input()) + 1)\n"
ANSWERS = {
    "an output below it": f"```python\n{SCRIPT}```\nOutput:\n```\n2\n```\n",
    "an output below it, without languages": f"```\n{SCRIPT}```\nOutput:\n```\n2\n```\n",
    "a fence that closes at the end of a line": "So:\n```python\nprint(int(input()) + 1)```\n",
    "a fence that opens at the end of a line": f"The program: ```python\n{SCRIPT}```",
    "a title": f'```python title="solution.py"\n{SCRIPT}```\n',
    "a file name": f"```python:solution.py\n{SCRIPT}```\n",
    "braces": f"``` {{.python}}\n{SCRIPT}```\n",
    "a version": f"```python3.12\n{SCRIPT}```\n",
    "capitals": f"```Python\r\n{SCRIPT}```\n",
    "tildes": f"~~~py\n{SCRIPT}~~~\n",
    "four backticks": f"````python\n{SCRIPT}````\n",
    "an item of a list": f"1. So:\n   ```python\n   {SCRIPT}   ```\n2. Done.",
    "an odd fence in the reasoning": f"<think>I begin with ```python\nx\n``` no.</think>\n```python\n{SCRIPT}```\n",
    "an unclosed draft in the reasoning": f"<think>\n```python\ndraft\n</think>\n```python\n{SCRIPT}```\n",
    "an unclosed draft": f"```python\nfor\n\nBetter:\n```python\n{SCRIPT}```\n",
    "an odd fence": f"```\nHm. Better:\n```python\n{SCRIPT}```\n",
    "a command below it": f"```python\n{SCRIPT}```\n```bash\npython solution.py\n```\n",
    "words behind the closing fence": f"```python\n{SCRIPT}``` This works because of x.\n",
    "a point behind the closing fence": f"```python\n{SCRIPT}```.\n",
    "code in a line": f"```python\n{SCRIPT}```\nHere ```int``` is needed.",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_script_is_found_in_an_answer(name: str) -> None:
    assert last_block(ANSWERS[name]) == SCRIPT


def test_only_a_closed_block_counts() -> None:
    assert last_block("```python\na\n```\n```python\nb") == "a\n"
    assert [last_block(text) for text in ("a = 1", "```python\na", "")] == [None] * 3


def test_the_program_is_the_block_that_defines_what_the_tests_call() -> None:
    usage = "```python\nprint(f(1))\nassert f(1) == 1\nresult = f(2)\n```\n"
    names = read_tests({"test_list": ["result = f(1)\nassert result == 1"]}).names
    assert last_block(f"```python\n{PROGRAM}```\n{usage}", names) == PROGRAM
    assert last_block(f"```python\ndef f():\n    draft\n```\n```python\n{PROGRAM}```\n{usage}", names) == PROGRAM
    assert last_block(f"```python\nf = None\n```\n{usage}", names) == "f = None\n"
    assert last_block(usage, names) == "print(f(1))\nassert f(1) == 1\nresult = f(2)\n"
    check = {"test": "def check(candidate):\n    assert candidate(1) == 1\n", "entry_point": "f"}
    assert last_block(f"```python\n{PROGRAM}```\n```python\n{check['test']}```", read_tests(check).names) == PROGRAM


def test_fences_in_a_docstring_belong_to_the_program() -> None:
    program = 'def f(x):\n    """Return it.\n\n    ```python\n    f(1)\n    ```\n    """\n    return x\n'
    assert last_block(f"```python\n{program}```\n", ["f"]) == program


@pytest.mark.parametrize("unit", ["`", "``` ", " ", "\n", "\n```python", "f(", "async def ", "a`"])
def test_the_search_for_the_program_is_linear(unit: str) -> None:
    """Otherwise a completion could make the reward late: squared, these lengths take minutes."""
    begin = time.monotonic()
    last_block(f"```python\n{unit * (200_000 // len(unit))} `x\n```", ["f"])
    assert time.monotonic() - begin < 5
