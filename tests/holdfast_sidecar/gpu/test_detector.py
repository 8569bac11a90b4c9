"""What is wrong with a GPU: counters that rise, fall and hiccup, states that last, and what is not to be believed."""

from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast_sidecar.gpu import rules as table
from holdfast_sidecar.gpu.detector import Finding, GpuStates, judge
from holdfast_sidecar.gpu.exposition import Gpu, Sample, read

GPU = "GPU-1"


class Watch:
    """Samples of one GPU, ten seconds apart unless said otherwise."""

    def __init__(self) -> None:
        self.known: GpuStates = {}
        self.now, self._ticks = 0.0, 0

    def see(self, *, xids: dict[int, float] | None = None, after: float = 10.0, **values: float) -> list[Finding]:
        """By short field names. Its energy grows, as it does in life, unless it is given."""
        self._ticks += 1
        found = {table.ENERGY: float(self._ticks)} | {f"DCGM_FI_DEV_{name}": value for name, value in values.items()}
        gpu = Gpu(uuid=GPU, index=0, values=found, xids=xids)
        return self.sample(Sample(gpus=(gpu,), present=frozenset({GPU})), after)

    def sample(self, sample: Sample, after: float = 10.0) -> list[Finding]:
        self.now += after
        self.known, findings = judge(self.known, sample, self.now)
        return list(findings)

    def counted(self, name: str) -> float:
        return self.known[GPU].counted.get(name, 0.0)


@pytest.fixture
def watch() -> Watch:
    return Watch()


def told(findings: Iterable[Finding]) -> list[tuple[str, int | None, int]]:
    return [(finding.kind, finding.xid, finding.count) for finding in findings]


# XIDs


def test_an_xid_is_told_once_with_its_cause_and_what_helps(watch):
    assert watch.see(XID_ERRORS=0) == []
    (finding,) = watch.see(XID_ERRORS=79)
    assert (finding.kind, finding.xid, finding.cause, finding.action) == ("Xid", 79, "Infrastructure", "ReplaceNode")
    assert finding.words == "XID 79, the GPU has fallen off the bus"
    assert watch.see(XID_ERRORS=79) == []


def test_an_xid_that_was_there_before_the_pod_is_the_past(watch):
    assert watch.see(XID_ERRORS=79) == []
    assert told(watch.see(XID_ERRORS=31)) == [("Xid", 31, 1)]


def test_an_exporter_that_shows_xids_only_when_there_is_one(watch):
    assert watch.see() == []
    assert told(watch.see(XID_ERRORS=48)) == [("Xid", 48, 1)]


def test_returning_xid_is_not_new(watch):
    """It was hidden for a while."""
    for values in ({"XID_ERRORS": 0}, {"XID_ERRORS": 79}, {}, {"XID_ERRORS": 79}, {"XID_ERRORS": 0}):
        watch.see(**values)
    assert watch.see(XID_ERRORS=79) == []


def test_after_a_restart_of_the_exporter_the_same_xid_is_new(watch):
    for xid in (0, 79, 0, 0):
        watch.see(XID_ERRORS=xid)
    assert told(watch.see(XID_ERRORS=79)) == [("Xid", 79, 1)]


def test_where_xids_are_counted_none_is_missed(watch):
    watch.see(XID_ERRORS=0, xids={})
    assert told(watch.see(XID_ERRORS=31, xids={31: 2})) == [("Xid", 31, 2)]
    assert told(watch.see(XID_ERRORS=31, xids={31: 3, 94: 1})) == [("Xid", 31, 1), ("Xid", 94, 1)]
    assert watch.see(XID_ERRORS=31, xids={}) == [], "they left the exporter's window"
    assert told(watch.see(XID_ERRORS=31, xids={31: 1})) == [("Xid", 31, 1)]


def test_a_count_that_appears_with_its_first_xid_is_told_once(watch):
    watch.see(XID_ERRORS=0)
    assert told(watch.see(XID_ERRORS=79, xids={79: 1})) == [("Xid", 79, 1)]
    assert watch.see(XID_ERRORS=79, xids={79: 1}) == []


def test_an_xid_that_nobody_knows_is_told_without_advice(watch):
    watch.see(XID_ERRORS=0)
    (finding,) = watch.see(XID_ERRORS=999)
    assert (finding.xid, finding.cause, finding.action) == (999, "", "Ignore")


def parts(xids: dict[str, int], *, shared: bool) -> Sample:
    """Our parts of one GPU, each with its last XID."""
    gpus = tuple(
        Gpu(uuid=f"{GPU}/{part}", index=0, values={table.XID: float(xid)}, shared=shared)
        for part, xid in xids.items()
    )
    return Sample(gpus=gpus, present=frozenset(xids))


def test_a_programs_xid_on_a_shared_gpu_may_be_the_other_pods(watch):
    """The exporter shows the XID of one part on every part."""
    watch.sample(parts({"3": 0}, shared=True))
    assert watch.sample(parts({"3": 31}, shared=True)) == []
    assert told(watch.sample(parts({"3": 79}, shared=True))) == [("Xid", 79, 1)]


def test_an_xid_is_told_once_for_all_our_parts_of_a_gpu(watch):
    watch.sample(parts({"3": 0, "4": 0}, shared=False))
    assert told(watch.sample(parts({"3": 31, "4": 31}, shared=False))) == [("Xid", 31, 1)]


def test_the_table_is_sound():
    every = [xid for rule in table.XID_RULES for xid in rule.xids]
    assert len(every) == len(set(every)), "an XID has one meaning"
    rules = [*table.XID_RULES, *table.COUNT_RULES, *table.STATE_RULES]
    assert {rule.action for rule in rules} == {"Ignore", "InPlace", "ReplaceNode"}
    assert {rule.cause for rule in rules} == {"", "Application", "Infrastructure"}
    kinds = [rule.kind for rule in (*table.COUNT_RULES, *table.STATE_RULES)]
    assert len(kinds) == len(set(kinds))
    assert {name for rule in table.COUNT_RULES for name in rule.counters} <= table.COUNTERS.keys()


# Counters


def test_errors_are_counted_by_difference_from_the_first_sight(watch):
    assert watch.see(ECC_DBE_VOL_TOTAL=5) == [], "those were before"
    (finding,) = watch.see(ECC_DBE_VOL_TOTAL=7)
    assert (finding.kind, finding.count, finding.action) == ("DoubleBitEcc", 2, "ReplaceNode")
    assert told(watch.see(ECC_DBE_VOL_TOTAL=8)) == [("DoubleBitEcc", None, 1)]
    assert watch.counted("ecc_double_bit") == 3


def test_a_reset_counts_what_came_after_it(watch):
    for value in (5, 5, 1, 1):
        watch.see(ECC_SBE_VOL_TOTAL=value)
    assert watch.counted("ecc_single_bit") == 1
    watch.see(ECC_SBE_VOL_TOTAL=4)
    assert watch.counted("ecc_single_bit") == 4


def test_one_low_sample_is_no_reset(watch):
    for value in (5, 0, 5):
        assert watch.see(ECC_DBE_VOL_TOTAL=value) == []
    assert watch.counted("ecc_double_bit") == 0


def test_missing_field_continues_from_its_last_value(watch):
    watch.see(ECC_DBE_VOL_TOTAL=5)
    assert watch.see() == []
    assert told(watch.see(ECC_DBE_VOL_TOTAL=6)) == [("DoubleBitEcc", None, 1)]


def test_substitute_field_counts_no_error_twice(watch):
    watch.see(ECC_DBE_VOL_TOTAL=0, ECC_DBE_AGG_TOTAL=7)
    assert told(watch.see(ECC_DBE_VOL_TOTAL=1, ECC_DBE_AGG_TOTAL=8)) == [("DoubleBitEcc", None, 1)]
    assert watch.see(ECC_DBE_AGG_TOTAL=8) == []
    assert watch.see(ECC_DBE_AGG_TOTAL=9) == [], "it waits for the field that counts"
    assert told(watch.see(ECC_DBE_VOL_TOTAL=2, ECC_DBE_AGG_TOTAL=9)) == [("DoubleBitEcc", None, 1)]


def test_field_that_was_seen_first_counts(watch):
    watch.see(ECC_DBE_AGG_TOTAL=7)
    assert told(watch.see(ECC_DBE_VOL_TOTAL=1, ECC_DBE_AGG_TOTAL=8)) == [("DoubleBitEcc", None, 1)]
    assert watch.see(ECC_DBE_VOL_TOTAL=1, ECC_DBE_AGG_TOTAL=8) == []


def test_a_rate_is_told_once_an_episode(watch):
    watch.see(ECC_SBE_VOL_TOTAL=0)
    assert watch.see(ECC_SBE_VOL_TOTAL=60) == []
    (finding,) = watch.see(ECC_SBE_VOL_TOTAL=120)
    assert (finding.kind, finding.count) == ("SingleBitEcc", 120)
    assert finding.words == "120 correctable (single-bit) memory errors within 60 min"
    assert watch.see(ECC_SBE_VOL_TOTAL=200) == []
    assert watch.see(ECC_SBE_VOL_TOTAL=200, after=3601) == []
    assert told(watch.see(ECC_SBE_VOL_TOTAL=350)) == [("SingleBitEcc", None, 150)]


def test_slow_errors_never_make_a_rate(watch):
    assert not any(watch.see(ECC_SBE_VOL_TOTAL=90 * n, after=3600) for n in range(20))


def test_nvlink_errors(watch):
    watch.see(NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL=0, NVLINK_CRC_DATA_ERROR_COUNT_TOTAL=0)
    assert watch.see(NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL=9000, after=290) == [], "31 a second are no fault"
    found = watch.see(NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL=19000, NVLINK_CRC_DATA_ERROR_COUNT_TOTAL=11000)
    assert told(found) == [("NvLinkErrors", None, 30_000)]
    watch.see(NVLINK_REPLAY_ERROR_COUNT_TOTAL=5)
    assert told(watch.see(NVLINK_REPLAY_ERROR_COUNT_TOTAL=6)) == [("NvLinkReplay", None, 1)]
    watch.see(NVLINK_RECOVERY_ERROR_COUNT_TOTAL=0)
    assert told(watch.see(NVLINK_RECOVERY_ERROR_COUNT_TOTAL=1)) == [("NvLinkRecovery", None, 1)]


@given(st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=1, max_size=30))
def test_no_sequence_of_values_counts_more_than_was_ever_shown(values: list[int | None]):
    """A hiccup or a gap must never invent a double-bit error: every count stands in some sample."""
    watch, told_count = Watch(), 0
    for value in values:
        found = watch.see(**({} if value is None else {"ECC_DBE_VOL_TOTAL": float(value)}))
        told_count += sum(finding.count for finding in found if finding.kind == "DoubleBitEcc")
    assert told_count == watch.counted("ecc_double_bit") >= 0
    shown = [value for value in values if value is not None]
    if shown == sorted(shown):
        assert told_count == (shown[-1] - shown[0] if shown else 0)


# States


def test_rows_that_cannot_be_replaced_are_told_at_first_sight(watch):
    (finding,) = watch.see(ROW_REMAP_FAILURE=1)
    assert (finding.kind, finding.cause, finding.action) == ("RowRemapFailure", "Infrastructure", "ReplaceNode")
    assert watch.see(ROW_REMAP_FAILURE=1) == []
    assert watch.see() == []
    assert watch.see(ROW_REMAP_FAILURE=1) == [], "the field was missing, the fault was not mended"


def test_heat_has_to_last(watch):
    assert watch.see(GPU_TEMP=95) == []
    assert watch.see(GPU_TEMP=89) == []
    assert watch.see(GPU_TEMP=95) == []
    (finding,) = watch.see(GPU_TEMP=95, after=30)
    assert (finding.kind, finding.words) == ("Overheated", "too hot: it slows down (95 °C)")


def test_the_gpus_own_limit_goes_before_ours(watch):
    assert watch.see(GPU_TEMP=86, SLOWDOWN_TEMP=85) == []
    assert told(watch.see(GPU_TEMP=86, SLOWDOWN_TEMP=85, after=30)) == [("Overheated", None, 1)]


@pytest.mark.parametrize("name", ["CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS"])
def test_being_slowed_down_names_the_reasons(watch, name):
    reasons = {name: 0x40 | 0x08 | 0x04 | 0x01}
    assert watch.see(**reasons) == []
    (finding,) = watch.see(**reasons, after=60)
    assert (finding.kind, finding.words) == ("Throttled", "slowed down by its hardware (hw_slowdown, hw_thermal)")


def test_a_power_cap_is_no_fault(watch):
    assert watch.see(CLOCK_THROTTLE_REASONS=4) == []
    assert watch.see(CLOCK_THROTTLE_REASONS=4, after=600) == []


def test_readings_that_stand_still_are_not_believed(watch):
    frozen = {"TOTAL_ENERGY_CONSUMPTION": 5.0, "POWER_USAGE": 300.0, "GPU_TEMP": 60.0}
    watch.see(**frozen)
    assert not watch.known[GPU].readings_frozen(watch.now + 299)
    assert watch.known[GPU].readings_frozen(watch.now + 300)
    watch.see(**frozen, after=290)
    assert watch.see(**frozen, after=10, ROW_REMAP_FAILURE=1) == [], "what else it shows is as old"
    assert told(watch.see(**{**frozen, "POWER_USAGE": 301.0}, ROW_REMAP_FAILURE=1)) == [("RowRemapFailure", None, 1)]


def test_a_gpu_that_tells_little_is_not_taken_for_frozen(watch):
    watch.see(TOTAL_ENERGY_CONSUMPTION=9223372036854775794.0)
    few = Sample(gpus=(Gpu(uuid="GPU-2", index=1, values={table.TEMPERATURE: 40.0}),), present=frozenset({"GPU-2"}))
    watch.sample(few)
    assert not watch.known["GPU-2"].readings_frozen(watch.now + 10_000)


# GPUs that vanish


def test_vanished_gpu_is_reported_after_a_minute(watch):
    watch.see()
    others = Sample(gpus=(), present=frozenset({"GPU-of-another"}))
    assert watch.sample(others) == []
    (finding,) = watch.sample(others, after=60)
    assert (finding.kind, finding.action) == ("Vanished", "Ignore")
    assert watch.sample(others, after=60) == []
    assert watch.see() == []
    assert watch.sample(others) == []
    assert told(watch.sample(others, after=60)) == [("Vanished", None, 1)]


def test_empty_exporter_is_no_vanished_gpu(watch):
    watch.see()
    nothing = Sample(gpus=())
    assert watch.sample(nothing) == []
    assert watch.sample(nothing, after=600) == []


OURS = 'namespace="ml",pod="gpt-w0",container='
MAPPINGS = ((f'{OURS}"trainer"',), ('namespace="",pod="",container=""',), (), (f'{OURS}"trainer"', f'{OURS}"side"'))
"""The labels of the series of one GPU in successive samples: of its pod, empty, without, and of two containers."""


def shown(number: int) -> bytes:
    """Two GPUs in sample `number`, as exporters of several versions show them. From sample 6 on each has errors."""
    lines = []
    for gpu in range(2):
        uuid = "uuid" if number % 2 else "UUID"
        own = f'gpu="{gpu}",{uuid}="GPU-{gpu}",err_msg="a \\"quoted\\" {{brace}}, and comma"'
        for mapping in MAPPINGS[number % len(MAPPINGS)] or ("",):
            labels = f"{own},{mapping}".rstrip(",")
            lines += [
                f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{labels}}} {4.5e8 + 4000 * number:e}",
                f"DCGM_FI_DEV_XID_ERRORS{{{labels}}} {79 if number > 5 else 0}",
                *[f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{labels}}} {3 if number > 5 else 2}e+00"] * 2,
            ]
    return "\n".join([*lines, ""]).encode()


def test_unstable_labels_keep_the_pods_gpus(watch, pod):
    """No error is counted twice."""
    found = []
    for number in range(20):
        sample = read(shown(number), pod, known=watch.known)
        assert [gpu.uuid for gpu in sample.gpus] == ["GPU-0", "GPU-1"], f"sample {number}"
        found += watch.sample(sample)
    assert [(one.uuid, one.kind, one.xid) for one in found if one.xid] == [("GPU-0", "Xid", 79), ("GPU-1", "Xid", 79)]
    assert table.VANISHED_KIND not in {one.kind for one in found}
    (name,) = (name for name, fields in table.COUNTERS.items() if "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" in fields)
    assert [track.counted[name] for track in watch.known.values()] == [1, 1]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(sorted(table.FIELDS)),
            st.floats(0, 2.0**46, allow_nan=False),
        ),
        max_size=20,
    )
)
@example([{"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 0.0}, {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 0.5}])
def test_whatever_an_exporter_shows_is_judged(samples: list[dict[str, float]]):
    known: GpuStates = {}
    for number, values in enumerate(samples):
        gpu = Gpu(uuid=GPU, index=None, values=values)
        known, findings = judge(known, Sample(gpus=(gpu,), present=frozenset({GPU})), 10.0 * number)
        assert all(finding.count > 0 and finding.words for finding in findings)


def test_judging_changes_nothing_that_it_was_given(watch):
    watch.see(ECC_DBE_VOL_TOTAL=1)
    before = watch.known
    kept = before[GPU]
    watch.see(ECC_DBE_VOL_TOTAL=9, XID_ERRORS=79)
    assert before[GPU] is kept
    assert kept.counted["ecc_double_bit"] == 0
