"""``--target-bpw``: sizes kept, sensitivity that the running model confirms, and what else a job promises."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from edgellm_models.checkpoint import open_checkpoint
from edgellm_models.errors import ResourceError, UsageError
from edgellm_models.network.build import LayerLoader, build_decoder
from edgellm_quantize.api import quantize_model
from edgellm_quantize.calibration import CalibrationTokens
from edgellm_quantize.capture import collect, open_stream
from edgellm_quantize.feedback_share import feedback_shares
from edgellm_quantize.grids import BlockTypeGrid, dequantize
from edgellm_quantize.imatrix_file import read_imatrix
from edgellm_quantize.overlay import OverlayCheckpoint
from edgellm_quantize.recipe import CalibrationSpec, QuantizeJob, QuantizeRecipe, QuantizeReport
from edgellm_quantize.rounding import RoundingOptions, gptq, output_error, round_nearest
from edgellm_quantize.sensitivity import (
    _rounded,
    candidate_types,
    measured_sensitivity,
    relative_error,
    sampled_layers,
)
from tests.support.core_jobs import random_calibration
from tests.support.oracles import require_oracle
from tests.support.paged import PagedRun
from tests.support.tiny_models import make_tiny

TEXT = "A fox met a hen by the old mill, and they talked of 7 x 6 = 42. " * 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama",
        tmp_path_factory.mktemp("target") / "model",
        quantizable=True,
        num_hidden_layers=2,
        intermediate_size=256,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSpec:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return CalibrationSpec("file", path, samples=8, sequence_length=64)


def _quantize(
    source: Path, out: Path, bpw: float, calibration: CalibrationSpec, **options: object
) -> QuantizeReport:
    pairs = options.pop("tensor_types", ())
    recipe = QuantizeRecipe(target_bpw=bpw, effort="fast", tensor_types=pairs)  # type: ignore[arg-type]
    return quantize_model(QuantizeJob(source, out, recipe, calibration, **options))  # type: ignore[arg-type]


def test_the_size_is_kept_and_used(model: Path, text: CalibrationSpec, tmp_path: Path) -> None:
    """True bits of the file's tensors, calibrated or not; more bits, less error; named types stay."""
    before = math.inf
    for bpw in (3.0, 5.5):
        report = _quantize(model, tmp_path / f"{bpw}.gguf", bpw, text, tensor_types=(("attn_v", "Q6_K"),))
        opened = open_checkpoint(tmp_path / f"{bpw}.gguf")
        kinds = {name: info.type_name for name, info in opened.tensors().items()}
        assert kinds == {tensor.name: tensor.type_name for tensor in report.tensors}
        held = sum(tensor.nbytes for tensor in report.tensors)
        assert bpw - 0.3 < 8 * held / report.num_weights <= bpw
        assert kinds["blk.1.attn_v.weight"] == "Q6_K" and kinds["blk.0.attn_norm.weight"] == "F32"
        assert report.method == "gptq" and f"{bpw:g} bits" in report.type_name
        error = sum(tensor.relative_error or 0.0 for tensor in report.tensors)
        assert error < before
        before = error
    plain = _quantize(model, tmp_path / "plain.gguf", 4.85, CalibrationSpec())
    assert 4.6 < plain.bits_per_weight <= 4.85 and plain.method == "rtn"
    assert "sensitivity_not_measured" in [notice.kind for notice in plain.notices]
    assert not list(tmp_path.glob("*.json"))
    with pytest.raises(UsageError, match="smallest types that fit this model's rows take 2"):
        _quantize(model, tmp_path / "none.gguf", 2.0, CalibrationSpec())


def test_a_resumed_job_keeps_the_types_that_were_chosen(
    model: Path, text: CalibrationSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E16: they are taken from the work folder, not measured again, so the grids stay the same."""
    from edgellm_quantize import quantized_gguf

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantized_gguf, "write_planned_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _quantize(model, tmp_path / "a.gguf", 4.5, text)
    monkeypatch.undo()
    assert not (tmp_path / "a.gguf").exists() and (tmp_path / "a.gguf.work").is_dir()
    kept = json.loads((tmp_path / "a.gguf.work" / "kept-types.json").read_text())["value"]["types"]
    monkeypatch.setattr("edgellm_quantize.target_size.measured_sensitivity", interrupted)
    report = _quantize(model, tmp_path / "a.gguf", 4.5, text, resume=True)
    assert {tensor.name: tensor.type_name for tensor in report.tensors} == kept
    assert {path.name for path in tmp_path.iterdir()} == {"a.gguf"}


@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi3"])
def test_sensitivity_is_the_divergence_of_the_running_model(arch: str, tmp_path: Path) -> None:
    """Against the paged decoder with one matrix rounded: KL over the relative error of that rounding."""
    checkpoint = open_checkpoint(make_tiny(arch, tmp_path / "m", num_hidden_layers=2))
    decoder = build_decoder(checkpoint)
    ids = random_calibration(decoder.spec.vocab_size, sequences=1, length=96).sequences
    up = "blk.1.ffn_up.weight"
    names = ["blk.0.attn_output.weight", up, "token_embd.weight"]
    found = measured_sensitivity(checkpoint, names, ids)
    assert found.measured and set(found.loss) == set(names)
    wanted = PagedRun(decoder).step([("a", ids[0])])[0].log_softmax(-1)
    for name in names:
        weight = dequantize(checkpoint.weight(name))
        values = torch.from_numpy(_rounded(weight.numpy(), "Q4_0"))
        changed = build_decoder(OverlayCheckpoint(checkpoint, {name: values}))
        logs = PagedRun(changed).step([("a", ids[0])])[0].log_softmax(-1)
        each = (wanted.exp() * (wanted - logs)).sum(-1)
        error = float((values - weight).square().sum() / weight.square().sum())
        # Every second token is compared there.
        assert found.loss[name] * error == pytest.approx(float(each[::2].mean()), rel=0.02), name


def test_what_error_feedback_leaves_is_what_the_core_leaves(model: Path) -> None:
    """Against rounding both ways by hand, judged on sequences that the feedback was not fitted to."""
    checkpoint = open_checkpoint(model)
    loader = LayerLoader(checkpoint)
    ids = random_calibration(loader.spec.vocab_size, sequences=8, length=256).sequences
    names = ["blk.0.attn_q.weight", "blk.1.ffn_down.weight", "token_embd.weight"]
    shares = feedback_shares(checkpoint, names, ids)
    streams = [open_stream(loader, part, 512) for part in ((*ids[:3], *ids[4:7]), (ids[3], ids[7]))]
    fitted_to, judged_on = (collect("qkv", 0, stream, loader.layer(0)).input.hessian for stream in streams)
    assert fitted_to is not None
    weight, grid = dequantize(checkpoint.weight(names[0])), BlockTypeGrid("Q4_0", "fast")
    errors = [
        output_error(weight, found.values, judged_on)
        for found in (
            gptq(weight, fitted_to, grid, RoundingOptions(candidates=0)),
            round_nearest(weight, grid, None, 0),
        )
    ]
    assert shares[names[0]] == pytest.approx(errors[0] / errors[1], rel=1e-3)
    assert 0 < shares[names[1]] <= 1 and shares[names[0]] < 1


def test_feedback_is_counted_only_where_it_works(
    model: Path, text: CalibrationSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less loss is budgeted in the blocks, not for the embedding; without calibration nothing is."""
    asked = []

    def remembered(checkpoint: object, names: Sequence[str], *_: object) -> dict[str, float]:
        asked.append(names)
        return dict.fromkeys(names, 1e-6)

    monkeypatch.setattr("edgellm_quantize.target_size.feedback_shares", remembered)
    _quantize(model, tmp_path / "plain.gguf", 4.5, CalibrationSpec())
    assert not asked
    report = _quantize(model, tmp_path / "a.gguf", 4.5, text)
    kinds = {tensor.name: tensor.type_name for tensor in report.tensors}
    assert asked and kinds["token_embd.weight"] in ("Q6_K", "Q8_0", "F16")


def test_types_that_fit_and_layers_that_are_measured() -> None:
    assert candidate_types(512)[0] == "Q2_K" and candidate_types(576)[0] == "Q4_0"
    assert candidate_types(100) == ("F16",)
    assert sampled_layers(3) == [0, 1, 2]
    many = sampled_layers(80)
    assert many[0] == 0 and many[-1] == 79 and len(many) == 8
    rows = torch.randn((16, 512), generator=torch.Generator().manual_seed(2)).numpy()
    errors = [relative_error(rows, kind, None) for kind in candidate_types(512)[:-1]]
    assert errors == sorted(errors, reverse=True) and errors[-1] > 0


def test_the_saved_importance_is_that_of_the_original(
    model: Path, text: CalibrationSpec, tmp_path: Path
) -> None:
    """As llama-imatrix has it: mean squares of the inputs of transformers' linears, nothing quantized."""
    transformers = require_oracle("transformers")
    job = QuantizeJob(
        model, tmp_path / "o.gguf", QuantizeRecipe(type="q2_k", effort="fast"), text,
        save_imatrix=tmp_path / "i.gguf",
    )  # fmt: skip
    quantize_model(job)
    saved = read_imatrix(tmp_path / "i.gguf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}
    stems = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.up_proj": "ffn_up"}
    stems |= {"mlp.down_proj": "ffn_down"}

    def watch(name: str) -> None:
        def hook(_: object, args: tuple[torch.Tensor, ...]) -> None:
            seen[name] = seen.get(name, torch.zeros(())) + args[0].double().square().sum((0, 1))

        index, long = name.split(".", 1)
        reference.model.layers[int(index)].get_submodule(long).register_forward_pre_hook(hook)

    for index in range(2):
        for long in stems:
            watch(f"{index}.{long}")
    tokens = _tokens(model, text)
    with torch.no_grad():
        for sequence in tokens.sequences:
            reference(torch.tensor([sequence]))
    for name, total in seen.items():
        index, long = name.split(".", 1)
        entry = saved.entries[f"blk.{index}.{stems[long]}.weight"]
        assert entry.count == tokens.num_tokens
        ours, theirs = torch.from_numpy(entry.mean_square), (total / tokens.num_tokens).float()
        assert torch.allclose(ours, theirs, rtol=2e-4, atol=1e-7), name
    assert saved.chunk_count == len(tokens.sequences)


def _tokens(model: Path, spec: CalibrationSpec) -> CalibrationTokens:
    from edgellm_models.tokenizer import load_tokenizer
    from edgellm_quantize.calibration import calibration_tokens

    checkpoint = open_checkpoint(model)
    tokenizer = load_tokenizer(model, checkpoint.file_format, checkpoint.metadata)
    found = calibration_tokens(spec, tokenizer, tokenizer.vocab_size)
    assert found is not None
    return found


def test_dry_runs_estimate_and_memory_is_kept(model: Path, text: CalibrationSpec, tmp_path: Path) -> None:
    """E11: a calibrated dry run says time and memory; what max-memory cannot hold is refused or left out."""
    out = tmp_path / "out"
    for recipe in (QuantizeRecipe(), QuantizeRecipe(format="gptq"), QuantizeRecipe(format="awq")):
        job = QuantizeJob(model, out, recipe, text, dry_run=True)
        report = quantize_model(job)
        assert report.seconds > 0 and report.peak_bytes > 500 << 20
        assert "512 tokens" in next(n.detail for n in report.notices if n.kind == "estimate_from_probes")
        tight = dataclasses.replace(job, max_memory=report.peak_bytes - (20 << 20))
        assert quantize_model(tight).peak_bytes < report.peak_bytes
    for recipe in (QuantizeRecipe(), QuantizeRecipe(format="gptq"), QuantizeRecipe(format="hf")):
        job = QuantizeJob(model, out, recipe, max_memory=64 << 20)
        with pytest.raises(ResourceError, match=r"max-memory 64 MiB: .* needs [\d,]+ MiB"):
            quantize_model(job)
    assert not list(tmp_path.iterdir())


def test_names_are_read_in_either_case() -> None:
    recipe = QuantizeRecipe(type="q4_k_m", dtype="BF16", method="GPTQ", tensor_types=(("attn", "q6_k"),))
    assert (recipe.type, recipe.dtype, recipe.method) == ("Q4_K_M", "bf16", "gptq")
    assert recipe.tensor_types == (("attn", "Q6_K"),)


def test_a_disk_that_is_really_full(model: Path, tmp_path: Path) -> None:
    """E16: the kernel refuses bytes in the middle of a file (a size limit): one line, exit 73, no file."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "from edgellm.cli.main import run\n"
        "for form in ('gguf', 'gptq'):\n"
        "    out = sys.argv[2] + '/' + form\n"
        "    print(run(['quantize', sys.argv[1], out, '--format', form, '--effort', 'fast']))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "EDGELLM_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.stdout.split() == ["73", "73"], done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note")]
    assert len(errors) <= 4 and "gguf" in done.stderr and "gptq" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}


@pytest.mark.parametrize("form", ["awq", "gptq", "gguf"])
def test_one_activation_channel_ten_thousand_times_larger(form: str, tmp_path: Path) -> None:
    """E09, E19: zero groups, 1e-8 and 6e4 in up_proj, one huge channel, a Gemma stream beyond f16: finite.

    The file is read back and run: logits are finite and every scale can be stored.
    """
    from safetensors.torch import load_file, save_file

    folder = make_tiny("gemma3", tmp_path / "m", num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    up[:, :32] = 0
    up[1], up[2, 40] = 1e-8, 6e4
    gain = tensors["model.layers.0.pre_feedforward_layernorm.weight"]
    gain[5] = 1e4
    tensors["model.embed_tokens.weight"] *= 1e4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "t.txt").write_text(TEXT)
    recipe = QuantizeRecipe(format=form, group_size=32 if form != "gguf" else None, effort="fast")
    spec = CalibrationSpec("file", tmp_path / "t.txt", samples=6, sequence_length=48)
    report = quantize_model(QuantizeJob(folder, tmp_path / "out", recipe, spec))
    rounded = [t.relative_error for t in report.tensors if t.relative_error is not None]
    assert len(rounded) >= 14 and all(math.isfinite(error) for error in rounded)
    decoder = build_decoder(open_checkpoint(tmp_path / "out"))
    logits = PagedRun(decoder).step([("a", [2, 9, 30, 77, 5])])[0]
    assert bool(torch.isfinite(logits).all())


def test_narrow_rows_meet_their_size_too(tmp_path: Path) -> None:
    """E13: rows of 96 have no k-quants: the types of 32 weights are chosen among."""
    folder = make_tiny("qwen2", tmp_path / "m", num_hidden_layers=2, hidden_size=96, head_dim=24)
    report = _quantize(folder, tmp_path / "q.gguf", 5.2, CalibrationSpec())
    assert 4.9 < report.bits_per_weight <= 5.2
    kinds = {t.type_name for t in report.tensors if t.shape[-1] == 96 and len(t.shape) == 2}
    assert kinds <= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16"} and len(kinds) > 1
