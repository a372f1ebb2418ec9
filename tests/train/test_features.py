"""Features are those of the target as it decodes; those in memory cost no second pass, whatever is asked in whatever order."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import TinyPair
from tests.models.gguf import files
from tests.models.gguf.converted import random_model
from tests.tiles import needs_kernels
from tests.tiny import SHAPE, random_drafter
from tests.train.runs import engine_features
from volley import Engine
from volley.train.documents import Document
from volley.train.features import KEPT, FeatureMemory, Features, FrozenTarget, OnlineFeatures, RememberedFeatures

RNG = random.Random(0)
DOCUMENTS = [Document(torch.tensor(RNG.choices(range(260), k=n), dtype=torch.int32), 1) for n in (2, 5, 9, 9, 14)]
Asked = tuple[list[int], list[int], bool]
ASKED = st.tuples(
    st.lists(st.sampled_from(range(len(DOCUMENTS))), min_size=1, max_size=4),
    st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=2, unique=True),
    st.booleans(),
)


@pytest.fixture(scope="module")
def target(tiny_pair: TinyPair) -> FrozenTarget:
    return FrozenTarget(str(tiny_pair.target), torch.float32, torch.device("cpu"))


def alone(target: FrozenTarget, layers: Sequence[int], with_final: bool, document: Document) -> Features:
    return OnlineFeatures(target, layers, with_final)([document], [0])


@pytest.mark.slow
@given(st.lists(ASKED, min_size=1, max_size=5), st.sampled_from([0, 4000, 10**9]))
def test_what_is_remembered_is_what_the_target_computes(target: FrozenTarget, asked: list[Asked], budget: int) -> None:
    target.remembered = FeatureMemory(budget)
    for chosen, layers, with_final in asked:
        documents = [DOCUMENTS[index] for index in chosen]
        found = RememberedFeatures(target, layers, with_final)(documents, chosen)
        assert (found.final is not None) == with_final
        for row, document in enumerate(documents):
            length, expected = len(document), alone(target, layers, with_final, document)
            assert torch.equal(found.taps[row, :length], expected.taps[0].to(KEPT).float())
            assert not found.taps[row, length:].any()
            if found.final is not None and expected.final is not None:
                assert torch.equal(found.final[row, :length], expected.final[0].to(KEPT).float())
    assert target.remembered.size <= budget


def test_documents_that_are_read_together_are_read_as_each_alone(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.remembered = FeatureMemory(10**9)
    source = RememberedFeatures(target, [0, 2], True)
    source.read(DOCUMENTS)
    with monkeypatch.context() as patch:
        patch.setattr(target.model.get_decoder(), "forward", None)  # all is known
        found = source(DOCUMENTS, range(len(DOCUMENTS)))
    assert found.final is not None
    for row, document in enumerate(DOCUMENTS):
        expected = alone(target, [0, 2], True, document)
        assert expected.final is not None
        torch.testing.assert_close(found.taps[row, : len(document)], expected.taps[0], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(found.final[row, : len(document)], expected.final[0], atol=1e-2, rtol=1e-2)


def test_each_document_passes_once(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target.remembered = FeatureMemory(10**9)
    passes: list[int] = []
    decoder = target.model.get_decoder()
    hook = decoder.register_forward_pre_hook(lambda *_: passes.append(1))
    asked = (([0, 1], False, 5), ([1], False, 5), ([1], True, 10), ([0], True, 10), ([-1], False, 15))
    for layers, with_final, expected in asked:
        RememberedFeatures(target, layers, with_final)(DOCUMENTS, range(len(DOCUMENTS)))
        assert len(passes) == expected
    hook.remove()
    size = sum(map(len, DOCUMENTS)) * target.text_config.hidden_size * KEPT.itemsize
    assert target.remembered.size == 4 * size  # three layers and the final states, each once
    target.remembered.clear()
    assert target.remembered.of(DOCUMENTS[0]) == {}


@needs_kernels
def test_a_quantised_file_is_read_as_it_decodes(tmp_path: Path) -> None:
    """The engine's prompt pass gives the same numbers; dense weights, whose inputs are not rounded to codes, give others."""
    path = tmp_path / "q4_0.gguf"
    files.write_model(path, random_model("llama"), "llama", "Q4_0", tokenizer=files.bpe_tokenizer())
    target = FrozenTarget(str(path), torch.float32, torch.device("cpu"))
    assert target.served is not None
    found = OnlineFeatures(target, [0, 1], False)(DOCUMENTS, range(len(DOCUMENTS))).taps
    assert found.dtype == torch.float32
    dense = OnlineFeatures(target, [0, 1], True)(DOCUMENTS, range(len(DOCUMENTS))).taps
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": files.VOCAB}
    drafter = random_drafter(num_target_layers=3, target_layer_ids=(0, 1), **shape)
    served = Engine(target.served, drafter.to(target.served.dtype), policy="fixed", prefix_caching=False)
    for row, document in enumerate(DOCUMENTS):
        own = found[row, : len(document)]
        assert not found[row, len(document) :].any()
        assert torch.equal(own, engine_features(served, document.token_ids.tolist()).float())
        assert 0 < (own - dense[row, : len(document)]).norm() < 0.05 * own.norm()
