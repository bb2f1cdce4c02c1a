"""Fresh memory holds poison in tests, in every thread and in every rank's process."""

import threading

import pytest
import torch

import tokenyard as ty


def poisoned(group=None):
    like = torch.zeros(5)
    fresh = [torch.empty(5), torch.empty_like(like), like.new_empty(5), torch.empty_strided((5,), (1,))]
    numbers = all(bool(tensor.isnan().all()) for tensor in fresh)
    return numbers and torch.empty(5, dtype=torch.uint8).tolist() == [255] * 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are left alone")
def test_fresh_memory_is_poison_everywhere():
    assert poisoned()
    found = []
    thread = threading.Thread(target=lambda: found.append(poisoned()))
    thread.start()
    thread.join()
    assert found == [True]
    assert ty.launch(2, poisoned, ranks="processes") == [True, True]
