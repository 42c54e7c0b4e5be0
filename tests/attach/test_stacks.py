"""Where another thread is, asked while it runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from autopar.attach.stacks import lines_of

# Garbage is collected at nearly each allocation, and runs code: what made a walk over another thread's frames endless.
BUSY = """
import gc, sys, threading, time
from autopar.attach.stacks import lines_of

class Cyclic:
    def __init__(self): self.itself = self
    def __del__(self): sum(range(50))

def deep(left):
    Cyclic()
    return deep(left - 1) + 1 if left else 0

def look(thread):
    while time.monotonic() < until:
        found.append([line for file, line in lines_of(thread) if file == __file__])

gc.set_threshold(5), sys.setswitchinterval(1e-5)
found, until = [], time.monotonic() + 2
watchers = [threading.Thread(target=look, args=(threading.get_ident(),)) for _ in range(2)]
[watcher.start() for watcher in watchers]
while time.monotonic() < until:
    assert deep(30) == 30
[watcher.join() for watcher in watchers]
print(len(found), max(map(len, found)), *{lines[-1] for lines in found if lines})
"""


def test_a_thread_is_where_it_is_innermost_first(tmp_path: Path) -> None:
    script = tmp_path / "größe, 大.py"
    script.write_text("def waits(event):\n\n    event.wait()\n\n\ndef outer(event):\n    waits(event)\n")
    space: dict[str, object] = {}
    exec(compile(script.read_text(), str(script), "exec"), space)
    event = threading.Event()
    thread = threading.Thread(target=space["outer"], args=(event,))  # pyright: ignore[reportArgumentType]
    thread.start()
    found = [line for file, line in lines_of(thread.ident or 0) if file == str(script)]
    event.set()
    thread.join()
    assert found == [3, 7]
    assert lines_of(thread.ident or 0) == () and __file__ in [file for file, _ in lines_of(threading.get_ident())]


def test_a_thread_may_run_on_while_it_is_looked_at(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=root,
                          env={"PYTHONPATH": str(root)}, check=False)  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    count, deepest, *outermost = map(int, done.stdout.split())
    assert count > 100 and 1 < deepest < 40
    lines = BUSY.splitlines()  # every walk came out where the thread began, in the script itself
    assert outermost and all("def" not in lines[n - 1] and not lines[n - 1].startswith("    return") for n in outermost)
    assert min(outermost) > lines.index("gc.set_threshold(5), sys.setswitchinterval(1e-5)")
