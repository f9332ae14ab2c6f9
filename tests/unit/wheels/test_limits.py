"""Compilers at once: cores, free memory, what a recipe says of one compiler."""

import os

from envbuild.wheels.build.limits import GIB, Limits, choose_limits, machine_limits


def test_the_memory_of_a_control_group_counts(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    8388608 kB\n")
    assert machine_limits(tmp_path / "meminfo", tmp_path)[1] == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{6 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    assert machine_limits(tmp_path / "meminfo", tmp_path)[1] == 4 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_limits(tmp_path / "meminfo", tmp_path) == (len(os.sched_getaffinity(0)), 8 * GIB)


def test_given_limits_override_the_machines():
    assert choose_limits(3, 5) == Limits(jobs=3, memory_gib=5)
    assert choose_limits().jobs == len(os.sched_getaffinity(0))
    assert choose_limits(1).memory_gib >= 1
