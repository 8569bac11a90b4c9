"""Whose the GPUs in an exporter's text are, and what it says of them."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from holdfast_sidecar import constants as c
from holdfast_sidecar.gpu.exposition import read
from holdfast_sidecar.protocol.report import Pod


def uuids(sample) -> list[str]:
    return [gpu.uuid for gpu in sample.gpus]


def test_only_this_pods_gpus_are_read(node_of, gpu_of, pod):
    node = node_of(gpu_of(0), gpu_of(1, pod="another"), gpu_of(2, namespace="theirs"))
    sample = read(node.text(), pod)
    assert uuids(sample) == [node.gpus[0].uuid]
    assert sample.present == {gpu.uuid for gpu in node.gpus}
    (gpu,) = sample.gpus
    assert gpu.index == 0
    assert gpu.values["DCGM_FI_DEV_GPU_TEMP"] == 48
    assert gpu.values["DCGM_FI_DEV_POWER_USAGE"] == pytest.approx(412.979)
    assert "DCGM_FI_DEV_PCIE_REPLAY_COUNTER" not in gpu.values, "nobody asked for it"


def test_what_is_read_is_what_prometheus_would_read(node_of, gpu_of, pod):
    text = node_of(gpu_of(0)).text()
    (gpu,) = read(text, pod).gpus
    bare = "\n".join(
        line for line in text.decode().splitlines() if not line.startswith("#")
    )  # else it renames counters
    families = text_string_to_metric_families(bare)
    theirs = {sample.name: sample.value for family in families for sample in family.samples}
    assert gpu.values == {name: value for name, value in theirs.items() if name in gpu.values}
    assert len(gpu.values) > 10


def test_an_exporter_with_the_old_names_is_read_alike(node_of, gpu_of, pod):
    gpus = gpu_of(0), gpu_of(1, pod="another")
    assert read(node_of(*gpus, old_names=True).text(), pod) == read(node_of(*gpus).text(), pod)


def test_a_pod_of_the_same_name_with_another_uid_is_another(node_of, gpu_of, pod):
    assert uuids(read(node_of(gpu_of(0, pod_uid="uid-w0")).text(), pod)) == [gpu_of(0).uuid]
    assert uuids(read(node_of(gpu_of(0, pod_uid="uid-before")).text(), pod)) == []


def test_without_a_mapping_the_gpus_count_that_the_launcher_sees(node_of, gpu_of, pod):
    node = node_of(gpu_of(0, pod=""), gpu_of(1, pod=""))
    assert uuids(read(node.text(), pod)) == []
    assert uuids(read(node.text(), pod, launcher_gpus={node.gpus[1].uuid})) == [node.gpus[1].uuid]


def test_gpu_of_another_pod_is_not_ours(node_of, gpu_of, pod):
    """The launcher sees the device, too."""
    node = node_of(gpu_of(0), gpu_of(1, pod="another"))
    sample = read(node.text(), pod, launcher_gpus={gpu.uuid for gpu in node.gpus})
    assert uuids(sample) == [node.gpus[0].uuid]


def test_a_gpu_stays_ours_when_the_mapping_is_away(node_of, gpu_of, pod):
    node = node_of(gpu_of(0, pod=""))
    assert uuids(read(node.text(), pod, known={node.gpus[0].uuid})) == [node.gpus[0].uuid]


def test_the_parts_of_a_gpu_are_told_apart(node_of, gpu_of, pod):
    node = node_of(gpu_of(0, instance="7"), gpu_of(0, pod="another", instance="8"))
    assert uuids(read(node.text(), pod)) == [f"{gpu_of(0).uuid}/7"]


def test_a_part_whose_other_parts_are_another_pods_is_shared(node_of, gpu_of, pod):
    ours = gpu_of(0, instance="7")
    (gpu,) = read(node_of(ours, gpu_of(0, pod="another", instance="8")).text(), pod).gpus
    assert (gpu.shared, gpu.device) == (True, ours.uuid)
    (gpu,) = read(node_of(ours).text(), pod).gpus
    assert not gpu.shared


def test_the_whole_gpus_uuid_proves_nothing_of_its_parts(node_of, gpu_of, pod):
    """Without a mapping, each part may be another pod's."""
    node = node_of(gpu_of(0, pod="", instance="7"), gpu_of(0, pod="", instance="8"))
    assert uuids(read(node.text(), pod, launcher_gpus={gpu_of(0).uuid})) == []


@pytest.mark.parametrize("blank", [9223372036854775794, 2147483632, 2147483635, 140737488355328.0, -1])
def test_a_blank_value_is_a_missing_one(node_of, gpu_of, pod, blank):
    gpu = gpu_of(0)
    gpu.set(ECC_DBE_VOL_TOTAL=blank)
    (read_gpu,) = read(node_of(gpu).text(), pod).gpus
    assert "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" not in read_gpu.values


def test_links_of_one_gpu_add_up(gpu_of, pod):
    uuid = gpu_of(0).uuid
    links = "".join(
        f'DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL{{nvlink="{link}",gpu="0",gpu_uuid="{uuid}",hostname="n"}} 2\n'
        for link in range(3)
    )
    (gpu,) = read(links.encode(), pod, known={uuid}).gpus
    assert gpu.values == {"DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 6}


def test_xids_are_counted_where_the_exporter_counts_them(node_of, gpu_of, pod):
    node = node_of(gpu_of(0, xid_counts={79: 1, 31: 4}), gpu_of(1, xid_counts={}), gpu_of(2))
    assert [gpu.xids for gpu in read(node.text(), pod).gpus] == [{79: 1, 31: 4}, {}, None]


def test_a_broken_line_costs_only_itself(node_of, gpu_of, pod):
    text = node_of(gpu_of(0)).text()
    broken = b'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-x\nDCGM_FI_DEV_FB_USED{} }{ 3\nDCGM_FI_DEV_GPU_UTIL{\xff} 1\n'
    assert read(broken + text + broken, pod) == read(text, pod)


def test_a_long_line_takes_no_longer_a_byte_than_a_short_one(pod):
    """4 MiB of them took a minute and a half."""

    def seconds(length: int) -> float:
        line = b"DCGM_FI_DEV_GPU_TEMP{" + b"a" * length + b"} 1\n"
        began = time.process_time()
        read(line * (200_000 // length), pod)
        return time.process_time() - began

    assert seconds(8000) < 10 * seconds(80)


def test_a_node_of_any_size_is_bounded(node_of, gpu_of, pod):
    gpus = [gpu_of(0, instance=str(number)) for number in range(200)]
    assert len(read(node_of(*gpus).text(), pod).gpus) == c.MAX_GPUS


@given(st.binary(max_size=2000))
def test_no_text_whatsoever_raises(body: bytes):
    pod = Pod(namespace="ml", name="gpt-w0", uid="uid-w0", node="n")
    lines = [b"DCGM_FI_DEV_GPU_TEMP{" + part for part in body.split(b"\x00")]
    found = read(b"\n".join([body, *lines]), pod, launcher_gpus={"GPU-1"})
    assert len(found.gpus) <= c.MAX_GPUS
