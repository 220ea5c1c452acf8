"""Reading processes from outside."""

from __future__ import annotations

import os
import subprocess
import sys

from bench.measuring import Load, family, most_memory, process_seconds, thread_seconds

BUSY = "import time\nwhile time.process_time() < 0.2: pass"


def test_the_time_of_a_child_that_was_waited_for_is_its_parents() -> None:
    before = process_seconds([os.getpid()])
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert process_seconds([os.getpid()]) - before >= 0.15


def test_a_family_has_its_children_and_not_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in family(os.getpid())
        assert os.getppid() not in family(os.getpid())
        assert most_memory(child.pid) > 0
        child.communicate(b"\n")
    assert process_seconds([child.pid]) == 0.0


def test_our_own_work_is_no_foreign_load() -> None:
    load, own = Load.now(), thread_seconds([os.getpid()])
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    now = Load.now()
    assert now.ours - load.ours >= 0.15
    assert thread_seconds([os.getpid()]) > own
