"""Models of Hugging Face as their configurations build them: captured whole, cut, and the same mathematics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from in_threads import check_same_gradients, even_plan, only_stage, profile, run_in_threads
from models import save_tiny_gpt2, sgd
from penstock import Job
from penstock.errors import CaptureError
from penstock.profile import Profile
from penstock.runtime.capture.capture import capture
from penstock.runtime.process.jobs import load_job
from penstock.workloads.transformers import import_transformers
from test_shapes import padded
from test_worker import check_same_weights, single_process

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed; pip install '.[dev]'", allow_module_level=True)
transformers = import_transformers()

VOCABULARY, LENGTH = 50, 8


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """With rotary embeddings, whose angles every layer reads, and fewer heads for keys than for queries."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


MODELS = pytest.mark.parametrize("model", [bert, gpt2, llama])
TIED = [(bert, "bert.embeddings.word_embeddings.weight"), (gpt2, "transformer.wte.weight")]


def make_job(model: Callable[[], nn.Module]) -> Job:
    torch.manual_seed(0)
    tokens, mask = torch.randint(0, VOCABULARY, (7, LENGTH)), torch.ones(7, LENGTH, dtype=torch.long)
    mask[::2, LENGTH - 2 :] = 0
    inputs = [{"input_ids": row, "attention_mask": seen} for row, seen in zip(tokens, mask, strict=True)]
    return Job(
        model=model(),
        data=list(zip(inputs, tokens, strict=True)),
        loss=lambda output, target: F.cross_entropy(output.logits.flatten(0, 1), target.flatten()),
        optimizer=sgd,
        batch_size=4,
    )


@functools.cache
def profile_of(model: Callable[[], nn.Module]) -> Profile:
    return profile(make_job(model))


@MODELS
def test_it_is_captured_operation_by_operation(model: Callable[[], nn.Module]) -> None:
    """GPT-2 and Llama return a cache of keys and values too, which no graph can hold."""
    found = profile_of(model)
    assert found.front_end == "export"
    assert len(found.graph.layers) > 40
    assert {p.name for p in found.graph.parameters} == {name for name, _ in make_job(model).model.named_parameters()}


@pytest.mark.parametrize("stages", [2, 4])
@MODELS
def test_its_gradients_are_those_of_one_process(model: Callable[[], nn.Module], stages: int) -> None:
    plan = even_plan(profile_of(model), (1,) * stages, "1f1b", microbatches=2)
    check_same_gradients(plan, lambda: make_job(model))


@pytest.mark.parametrize(("model", "name"), TIED)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_embedding_that_is_also_the_head_stays_one_weight(
    model: Callable[[], nn.Module], name: str, schedule: str
) -> None:
    def make() -> Job:
        job = make_job(model)
        for module in job.model.modules():  # type: ignore[union-attr]
            if isinstance(module, nn.Dropout):  # the plain model draws other numbers
                module.p = 0.0
        return job

    plan = even_plan(profile_of(model), (1, 2, 1), schedule, microbatches=2)
    assemblies = run_in_threads(plan, make)
    check_same_weights(assemblies, single_process(make(), plan))
    owned = [only_stage(assembly).weights.parameters for assembly in assemblies]
    copies = [parameters[name] for parameters in owned if name in parameters]
    assert len(copies) == 2
    assert torch.equal(*copies)


@MODELS
def test_sequences_may_be_of_any_length(model: Callable[[], nn.Module]) -> None:
    def make() -> Job:
        job = make_job(model)
        lengths = [3 + (5 * i) % 7 for i in range(9)]
        data = [(torch.randint(0, VOCABULARY, (n,)), torch.tensor(n)) for n in lengths]
        return replace(job, data=data, collate=collate)

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
        tokens, lengths = padded(samples)
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        return {"input_ids": tokens, "attention_mask": mask.long()}, tokens

    check_same_gradients(even_plan(profile(make()), (1, 1), "1f1b", microbatches=2), make)


def test_a_loss_sees_nothing_of_what_a_graph_cannot_return() -> None:
    job = make_job(gpt2)
    seen: list[Any] = []

    def loss(output: Any, target: Tensor) -> Tensor:
        seen.append(output.past_key_values)
        return job.loss(output, target)

    profile(replace(job, loss=loss))
    assert seen
    assert all(each is None for each in seen)


def test_layer_drop_is_refused_with_the_module_and_the_rate() -> None:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_layerdrop=0.1,
    )  # fmt: skip
    tokens = torch.randint(4, VOCABULARY, (3, LENGTH))
    with pytest.raises(CaptureError, match=r"model\.decoder \(BartDecoder\) skips layers at random .* < 0\.1`"):
        capture(transformers.BartForConditionalGeneration(config), {"input_ids": tokens, "decoder_input_ids": tokens})


def test_the_example_trains_a_local_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the weights that save_pretrained has written, which a file for --init has too, and without a download."""
    save_tiny_gpt2(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    example = Path(__file__).parent.parent / "examples" / "hugging_face.py"
    job = load_job(example)
    assert isinstance(job.model, nn.Module)
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint").state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in job.model.state_dict().items())
    found = profile(replace(job, batch_size=4))
    assert found.front_end == "export"
    plan = even_plan(found, (1, 1), "1f1b", microbatches=2)
    check_same_gradients(plan, lambda: replace(load_job(example), batch_size=4))
