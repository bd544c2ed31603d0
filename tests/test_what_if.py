"""Only the machine or the batch changes, and the plan moves as theory says."""

from itertools import pairwise

import pytest

from benchmarks.what_if import by_batch, by_memory, by_nvlink, by_slices


def tensor(answer) -> int:
    return answer.mesh.get("tensor", 1)


def test_less_memory_from_whole_weights_to_fsdp_to_tensor():
    ample, *others = by_memory()
    assert "tensor" not in ample.mesh
    assert ample.copies > 15  # a copy on every device, norms and positions split
    for before, after in pairwise([ample, *others]):
        assert after.memory_bytes < before.memory_bytes
        assert after.copies <= before.copies
        assert after.step_s > before.step_s
        assert tensor(after) >= tensor(before)
    *fsdp, last = others
    assert all("tensor" not in answer.mesh for answer in fsdp)
    assert fsdp[-1].copies == pytest.approx(1.0, rel=1e-2)
    assert tensor(last) > 1


def test_fewer_tokens_from_fsdp_to_tensor():
    answers = list(by_batch())
    widths = [tensor(answer) for answer in answers]
    assert widths == sorted(widths)
    assert (widths[0], widths[-1]) == (1, 16)


def test_tensor_needs_fast_links_and_stays_on_them():
    answers = list(by_nvlink())
    widths = [tensor(answer) for answer in answers]
    assert widths == sorted(widths)
    assert widths[0] == 1
    assert widths[-1] > 1
    for answer in answers:
        if tensor(answer) > 1:
            assert answer.links["tensor"] == ("nvlink",)
            assert "infiniband" in answer.links["fsdp"]


def test_tensor_stays_off_the_network_between_slices():
    whole, *cut = by_slices()
    assert tensor(whole) == 8
    for slices, answer in zip((2, 4), cut, strict=True):
        assert answer.links["tensor"] == ("ici",)
        assert tensor(answer) <= 16 // slices
        assert answer.mesh["data"] == slices
        assert answer.links["data"] == ("dcn",)
