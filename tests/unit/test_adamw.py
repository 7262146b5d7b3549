"""One AdamW update: the compiled pass against plain torch and torch's own, and how it is built."""

import os
import platform
import subprocess
import sys
from ctypes import CDLL

import pytest
import torch

from flatpeak.kernels import adamw as package
from flatpeak.kernels.adamw import Coefficients, adamw, host, reference
from flatpeak.kernels.adamw.build import CannotBuild, load_library
from flatpeak.kernels.adamw.host import agrees, same_bits

COEFFICIENTS = Coefficients.of(
    updates=3, lr=0.01, betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip_factor=0.7
)
SIZES = [1, 31, 32, 33, 64, 1023, 300_003]


# As this CPU takes it, and as CPUs with less than AVX-512 do.
CPUS = {"native": "", "AVX2": "-mno-avx512f", "no streams": "-mno-avx2 -mno-fma"}


def compile_for(cpu):
    with pytest.MonkeyPatch.context() as patch:
        if platform.machine() in ("x86_64", "AMD64"):
            patch.setenv("CXX", f"{os.environ.get('CXX', 'c++')} {CPUS[cpu]}")
        elif CPUS[cpu]:
            pytest.skip("these are options of x86-64")
        try:
            return host.bind(load_library(host.SOURCE))
        except CannotBuild as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module", params=CPUS)
def compiled(request):
    return compile_for(request.param)


@pytest.fixture(scope="module", params=["plain", *CPUS])
def update(request):
    return reference.adamw if request.param == "plain" else compile_for(request.param)


@pytest.fixture(scope="module")
def compiler():
    if host.compiled() is None:
        pytest.skip("needs a C++ compiler")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache folder of this test's own, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    host.compiled.cache_clear()
    yield tmp_path
    host.compiled.cache_clear()


def inputs(size, dtype=torch.float32, wild=True):
    """Old state and gradient; with `wild` half of each are any bits, no numbers included."""
    make = torch.Generator().manual_seed(size)
    values = torch.randn(4, size, generator=make)
    if wild:
        bits = torch.randint(-(2**31), 2**31, (4, size), generator=make, dtype=torch.int32)
        tame = torch.rand(4, size, generator=make) < 0.5
        values = torch.where(tame, values, bits.view(torch.float32))
    master, exp_avg, exp_avg_sq, gradient = values
    return master, exp_avg, exp_avg_sq.abs(), gradient.to(dtype)


def outputs(size, weights=torch.bfloat16):
    new = [torch.full((size,), torch.nan) for _ in range(3)]
    return [*new, torch.full((size,), torch.nan, dtype=weights) if weights else None]


def run(update, old, c=COEFFICIENTS, weights=torch.bfloat16):
    new = outputs(len(old[0]), weights)
    update(*old, *new, c)
    return [tensor for tensor in new if tensor is not None]


def all_same_bits(results, expected):
    return all(same_bits(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("weights", [torch.bfloat16, None], ids=["bf16 weights", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_the_compiled_pass_gives_the_bits_of_plain_torch(compiled, size, dtype, weights):
    old = inputs(size, dtype)
    expected = run(reference.adamw, old, weights=weights)
    assert all_same_bits(run(compiled, old, weights=weights), expected)


@pytest.mark.parametrize("updates", [1, 2, 1000, 10**7])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.95), (0.1, 0.0), (0.0, 0.9)], ids=str)
def test_the_compiled_pass_gives_the_bits_of_plain_torch_at_any_age(compiled, betas, updates):
    c = Coefficients.of(updates=updates, lr=3e-4, betas=betas, eps=0.0, decay=0.0)
    old = inputs(1000)
    assert all_same_bits(run(compiled, old, c), run(reference.adamw, old, c))


# Whole vectors of any length: torch rounds otherwise in what is left over.
@pytest.mark.parametrize("size", [1024, package.LEAST_COMPILED], ids=["plain", "compiled"])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_it_is_torchs_fused_adamw_to_the_bit(size, beta1):
    p, exp_avg, exp_avg_sq, gradient = inputs(size, wild=False)
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = gradient.clone()
    theirs = torch.optim.AdamW(
        [parameter], lr=0.01, betas=(beta1, 0.95), weight_decay=0.1, fused=True
    )
    state = {"exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
    theirs.state[parameter] = {"step": torch.tensor(6.0)} | state
    theirs.step()
    c = Coefficients.of(updates=7, lr=0.01, betas=(beta1, 0.95), eps=1e-8, decay=0.1)
    ours = run(adamw, (p, exp_avg, exp_avg_sq, gradient), c)
    moments = [theirs.state[parameter][name] for name in state]
    rounded = parameter.detach().bfloat16()
    assert all_same_bits(ours, [parameter.detach(), *moments, rounded])


def test_threads_and_cuts_do_not_change_a_bit(update):
    old = inputs(70_001)
    before = torch.get_num_threads()
    expected = run(update, old)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert all_same_bits(run(update, old), expected), threads
    finally:
        torch.set_num_threads(before)
    for cut in (1, 31, 32, 32_768, 70_000):
        parts = [
            run(update, [tensor[at] for tensor in old]) for at in (slice(cut), slice(cut, None))
        ]
        assert all_same_bits(map(torch.cat, zip(*parts, strict=True)), expected), cut


@pytest.mark.parametrize("offset", [1, 16], ids=["between lines", "on a line"])
@pytest.mark.parametrize("size", [5, 256, 1003])
def test_the_compiled_pass_writes_its_own_elements_alone(compiled, size, offset):
    old = inputs(size)
    whole = outputs(size + 2 * offset)
    compiled(*old, *(tensor[offset : offset + size] for tensor in whole), COEFFICIENTS)
    inner = [tensor[offset : offset + size] for tensor in whole]
    assert all_same_bits(inner, run(reference.adamw, old))
    for tensor in whole:
        assert tensor[:offset].isnan().all()
        assert tensor[offset + size :].isnan().all()


def test_state_may_be_updated_in_place(update):
    old = inputs(1003)
    expected = run(update, old)
    place = [tensor.clone() for tensor in old[:3]]
    weights = torch.empty(1003, dtype=torch.bfloat16)
    update(*place, old[3], *place, weights, COEFFICIENTS)
    assert all_same_bits([*place, weights], expected)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, torch.empty(9)),
        (3, torch.empty(20)[::2]),
        (4, torch.empty(10, dtype=torch.float64)),
        (7, torch.empty(10)),
        (7, torch.empty(11, dtype=torch.bfloat16)),
    ],
    ids=["size", "strides", "state dtype", "weights dtype", "size of weights"],
)
def test_tensors_that_do_not_fit_together_are_refused(compiled, place, wrong):
    tensors = [*inputs(10), *outputs(10)]
    tensors[place] = wrong
    with pytest.raises(AssertionError):
        compiled(*tensors, COEFFICIENTS)


def test_a_way_that_is_off_by_one_bit_does_not_agree():
    def almost(*arguments):
        reference.adamw(*arguments)
        arguments[6].view(torch.int32)[4000] += 1

    assert agrees(reference.adamw)
    assert not agrees(almost)


def test_small_runs_need_no_compiler(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    old = inputs(package.LEAST_COMPILED - 1)
    assert all_same_bits(run(adamw, old), run(reference.adamw, old))
    assert not caplog.records


def test_without_a_compiler_a_large_run_gives_the_same_and_says_so_once(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    old = inputs(package.LEAST_COMPILED)
    for _ in range(2):
        assert all_same_bits(run(adamw, old), run(reference.adamw, old))
    (record,) = caplog.records
    assert "AdamW runs in plain torch" in record.message
    assert "no C++ compiler (no-such-compiler); set CXX" in record.message


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch):
    broken = fresh / "broken"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] || { echo no such option >&2; exit 1; }\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CannotBuild, match=r"host\.cpp .* failed: no such option"):
        load_library(host.SOURCE)
    assert [path.suffix for path in (fresh / "cache" / "flatpeak").iterdir()] == [".lock"]


def test_it_is_built_once(fresh, compiler, monkeypatch):
    load_library(host.SOURCE)
    (library,) = (fresh / "cache" / "flatpeak").glob("*.so")
    made = library.stat().st_mtime_ns
    assert isinstance(load_library(host.SOURCE), CDLL)
    assert library.stat().st_mtime_ns == made
    monkeypatch.setattr("flatpeak.kernels.adamw.build._cpu", lambda: "another")
    load_library(host.SOURCE)
    assert len(list(library.parent.glob("*.so"))) == 2


@pytest.mark.parametrize("trouble", ["no folder", "damaged"])
def test_a_cache_that_cannot_be_used_is_done_without(fresh, compiler, trouble):
    cache = fresh / "cache"
    if trouble == "no folder":
        cache.write_text("a file")
    else:
        load_library(host.SOURCE)
        (library,) = (cache / "flatpeak").glob("*.so")
        library.unlink()
        library.write_bytes(b"no library")
    old = inputs(100)
    update = host.compiled()
    assert update is not None
    assert all_same_bits(run(update, old), run(reference.adamw, old))


def test_processes_that_build_at_once_do_not_break_each_other(fresh, compiler):
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from flatpeak.kernels.adamw import host\n"
        "print(host.compiled() is not None)"
    )
    command = [sys.executable, "-c", script]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in started] == ["True\n"] * 3
    suffixes = sorted(path.suffix for path in (fresh / "cache" / "flatpeak").iterdir())
    assert suffixes == [".lock", ".so"]
