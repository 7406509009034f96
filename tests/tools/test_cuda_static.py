"""tools/cuda_static.py on sample text: what it reads in ptxas, SASS and budgets, and that it sees a broken budget."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def tools():
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "build_backend")]
    yield
    for folder in ("tools", "build_backend"):
        sys.path.remove(str(ROOT / folder))


@pytest.fixture
def static():
    import cuda_static

    return cuda_static


PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6decodeIfEvv' for 'sm_80'
ptxas info    : Function properties for _Z6decodeIfEvv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 140 registers, used 1 barriers, 4128 bytes smem, 744 bytes cmem[0]
ptxas info    : Compiling entry function '_Z6decodeIfEvv' for 'sm_90'
ptxas info    : Function properties for _Z6decodeIfEvv
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, 496 bytes cmem[0]
"""
# A loop of 2 loads of 16 bytes, 1 of 4 and 2 mma; before it a smaller loop, around both an outer one.
SASS = """
		Function : _Z6decodeIfEvv
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;               /* 0x00000a00ff017b82 */
                                                                        /* 0x000ff00000000800 */
        /*0010*/                   LDG.E.64 R2, desc[UR4][R2.64] ;      /* 0x0000001402027981 */
        /*0020*/              @!P0 BRA 0x10 ;                           /* 0xfffffffc00dc1947 */
        /*0030*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ; /* 0x0 */
        /*0040*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ; /* 0x0 */
        /*0050*/               @P2 LDG.E.CONSTANT R12, desc[UR4][R6.64] ; /* 0x0 */
        /*0060*/                   HMMA.16816.F32.BF16 R16, R4, R8, R16 ; /* 0x0 */
        /*0070*/                   HMMA.16816.F32.BF16 R20, R4, R8, R20 ; /* 0x0 */
        /*0080*/               @P1 BRA 0x30 ;                           /* 0x0 */
        /*0090*/                   BRA 0x0 ;                            /* 0x0 */
        /*00a0*/                   EXIT ;                               /* 0x0 */
        /*00b0*/                   BRA 0xb0;                            /* 0x0 */
		Function : _Z4copyv
        /*0000*/                   EXIT ;                               /* 0x0 */
"""
# Loops from 0x20 inside one from 0x10 inside one from 0.
NESTED = """
		Function : _Z7prefillv
        /*0000*/                   LDG.E.64 R2, desc[UR4][R2.64] ;      /* 0x0 */
        /*0010*/                   HMMA.16816.F32 R16, R4, R8, R16 ;    /* 0x0 */
        /*0020*/                   LDS R4, [R5] ;                       /* 0x0 */
        /*0030*/               @P0 BRA 0x20 ;                           /* 0x0 */
        /*0040*/                   LDGSTS.E.BYPASS.128 [R6], desc[UR4][R2.64] ; /* 0x0 */
        /*0050*/               @P1 BRA 0x10 ;                           /* 0x0 */
        /*0060*/               @P2 BRA 0x0 ;                            /* 0x0 */
        /*0070*/                   EXIT ;                               /* 0x0 */
"""
BUDGET = "// budget: kernel=decode registers=168 shared=0 spills=20 threads=128 loads16=2 mma=2\n"


def report_of(static, budget, arch="sm_90"):
    taken = next(one for one in static.parse_ptxas(PTXAS) if one.arch == arch)
    taken = static.Resources(static.short_name("void ns::decode<float>(int)"), *list(vars(taken).values())[1:])
    found = static.budget_of(taken.kernel, arch, static.parse_budgets(budget))
    return static.Report(taken, found, static.parse_sass(SASS)["_Z6decodeIfEvv"])


def test_ptxas_is_read(static):
    assert list(static.parse_ptxas(PTXAS)) == [
        static.Resources("_Z6decodeIfEvv", "sm_80", 140, 4128, 0),
        static.Resources("_Z6decodeIfEvv", "sm_90", 168, 0, 20),
    ]


def test_the_main_loop_is_found(static):
    loops = static.parse_sass(SASS)
    loop = loops["_Z6decodeIfEvv"]
    assert (loop.instructions, loop.mma, loop.loads) == (6, 2, {16: 2, 4: 1})
    assert loop.wide_bytes == 32 * 2 * 16
    assert loop.instructions_per_kb == 6
    assert loops["_Z4copyv"] is None


def test_the_main_loop_may_hold_another(static):
    """What widens codes inside the loop over tiles is part of its pass; what stands around it is not."""
    loop = static.parse_sass(NESTED)["_Z7prefillv"]
    assert (loop.instructions, loop.mma, loop.loads) == (5, 1, {16: 1})


def test_names_are_short(static):
    demangled = "void kvpager::cuda::(anonymous namespace)::f<kvpager::float16, (int)4, true>(kvpager::P<int>, int*)"
    assert static.short_name(demangled) == "f<float16,4,true>"
    assert static.short_name("kvpager::cuda::take(unsigned int*)") == "take"


def test_what_is_within_its_budget_is_quiet(static):
    report = report_of(static, BUDGET)
    assert list(static.complaints(report)) == []
    assert report.resident_warps == 12  # 168 registers: 3 blocks of 4 warps
    assert report.bytes_in_flight == 12 * 1024
    assert "| `decode<float>` | sm_90 | 168 | 0 | 20 | 2 | 2 | 6 | 6 | 12 |" in static.as_table([report])


@pytest.mark.parametrize(
    ("tampered", "complaint"),
    [
        (("registers=168", "registers=160"), "decode<float> on sm_90: registers 168, budget 160"),
        (("spills=20", "spills=0"), "decode<float> on sm_90: spills 20, budget 0"),
        (("loads16=2", "loads16=16"), "decode<float> on sm_90: 2 loads16 in its main loop, at least 16 wanted"),
        (("mma=2", "mma=3"), "decode<float> on sm_90: 2 mma in its main loop, at least 3 wanted"),
        (("kernel=decode", "kernel=encode"), "decode: no budget in the sources"),
    ],
)
def test_a_tampered_budget_is_seen(static, tampered, complaint):
    (line,) = static.complaints(report_of(static, BUDGET.replace(*tampered)))
    assert line.startswith(complaint)


def test_shared_memory_is_bounded(static):
    (line,) = static.complaints(report_of(static, BUDGET, "sm_80"))
    assert line == "decode<float> on sm_80: shared 4128, budget 0"


def test_the_most_particular_budget_holds(static):
    text = (
        BUDGET
        + BUDGET.replace("kernel=decode", "kernel=decode<float")
        + BUDGET.replace("kernel=decode", "arch=sm_80 kernel=decode<float")
        + "    // budget: kernel=decoder registers=1 shared=0 spills=0\n"
    )
    budgets = list(static.parse_budgets(text))
    assert static.budget_of("decode<float>", "sm_90", budgets) == budgets[1]
    assert static.budget_of("decode<float>", "sm_80", budgets) == budgets[2]
    assert static.budget_of("decode<double>", "sm_80", budgets) == budgets[0]
    assert static.budget_of("decoder", "sm_80", budgets) == budgets[3]


@pytest.mark.parametrize(
    "line", ["kernel=f registers=3 shared=0", "kernel=f registers=3 shared=0 spills=0 lods=1", "f"]
)
def test_a_line_that_is_no_budget_is_refused(static, line):
    with pytest.raises(ValueError, match="not a budget"):
        list(static.parse_budgets(f"// budget: {line}\n"))


def test_the_cuda_version_is_that_of_torchs_run_time():
    from check_cuda import DEFAULT_CUDA, pinned_cuda

    assert pinned_cuda(["filelock", 'cuda-toolkit[cublas,cudart]==13.2.2; platform_system == "Linux"']) == "13.2"
    assert pinned_cuda(['nvidia-cuda-runtime-cu12==12.8.90; platform_system == "Linux"']) == "12.8"
    assert pinned_cuda(["nvidia-cuda-runtime==13.0.96"]) == "13.0"
    assert pinned_cuda(["numpy"]) == DEFAULT_CUDA
