"""The devices that a setting names, and the cores of each."""

import os

import pytest

from service.core.device_places import (
    Place,
    by_node,
    check_devices,
    core_groups,
    device_places,
    split,
)


@pytest.mark.parametrize("text", ["auto", "cpu", "CPU * 2", "cuda:0", "cuda:0, cuda:1"])
def test_devices_are_named(text):
    assert check_devices(text) == text.lower().replace(" ", "")


@pytest.mark.parametrize(
    "text", ["", "gpu", "cpu*0", "cpu*100", "cuda", "cuda:0,cuda:0", "cpu,cpu"]
)
def test_other_texts_name_no_devices(text):
    with pytest.raises(ValueError, match="names no devices"):
        check_devices(text)


def test_groups_of_cores_differ_by_one_core_at_most():
    assert split([0, 1, 2, 3, 4], 2) == [(0, 1), (2, 3, 4)]
    assert split([0, 1, 2, 3], 4) == [(0,), (1,), (2,), (3,)]
    assert (core_groups("cpu*3"), core_groups("cpu"), core_groups("cuda:0,cuda:1")) == (3, 1, 1)


def test_a_group_shares_a_node_where_it_can(tmp_path):
    """Machines number the cores of their nodes alternately, or in blocks with the second threads behind."""
    for node, cores in ((0, "0,2,4-5"), (1, "1,3,6-7")):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(cores + "\n")
    ordered = by_node(range(8), tmp_path)
    assert split(ordered, 2) == [(0, 2, 4, 5), (1, 3, 6, 7)]
    assert by_node([3, 1, 0], tmp_path / "none") == [0, 1, 3]


def test_groups_have_all_cores_once(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    places = device_places("cpu*2", "auto")
    assert [(place.name, place.cores) for place in places] == [("cpu:0", (2,)), ("cpu:1", (3, 5))]
    with pytest.raises(ValueError, match="there are only 3 cores"):
        device_places("cpu*4", "auto")


def test_one_device_uses_the_machine_as_it_is():
    assert device_places("cpu", "auto") == [Place("cpu")]
    assert device_places("auto", "cpu") == [Place("cpu")]


def test_gpus_are_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-ab")
    places = device_places("cuda:1,cuda:0", "auto")
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == ["GPU-ab", "3"]
    with pytest.raises(ValueError, match="only 2 GPUs are visible"):
        device_places("cuda:2", "auto")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_places("cuda:1", "auto")[0].environment == {"CUDA_VISIBLE_DEVICES": "1"}
