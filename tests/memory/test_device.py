"""Devices by name, and what is known of them."""

import os
from collections.abc import Callable

import pytest
import torch

from volley.errors import ConfigError
from volley.memory.device import Device, find_device, free_bytes, memory_bytes, peak_bytes, usable_device


def test_auto_is_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert usable_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert usable_device("auto") == torch.device("cuda")


def test_an_absent_device_is_named() -> None:
    with pytest.raises(ConfigError, match=r"device 'nowhere' cannot be used here.*use auto, cpu"):
        usable_device("nowhere")


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert find_device(torch.device("cpu")) == Device("cpu", None)


def test_free_memory_is_a_part_of_the_machine_s() -> None:
    free = free_bytes()
    assert free is None or 0 < free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_bytes(torch.device("cpu")) > 2**28


@pytest.mark.slow
def test_a_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [100]

    def say(name: str, answer: Callable[..., object]) -> None:
        monkeypatch.setattr(torch.cuda, name, answer)

    say("empty_cache", lambda: None)
    say("mem_get_info", lambda _: (7, 9))
    say("memory_allocated", lambda _: held[0])
    say("reset_peak_memory_stats", lambda _: None)
    say("max_memory_allocated", lambda _: max(held))
    cuda = torch.device("cuda")
    assert find_device(cuda) == Device("cuda", 7)
    assert peak_bytes(cuda, lambda: held.append(130)) == 30
