"""Read a Holdfast checkpoint by docs/reference/checkpoint-format.md with only json, numpy and xxhash."""

import json
import re
from pathlib import Path

import numpy as np
import xxhash

# numpy has no bfloat16 and no 8-bit floats: their bits are kept.
FORMS = "BOOL:? U8:u1 I8:i1 F8_E4M3:u1 F8_E5M2:u1 U16:<u2 I16:<i2 F16:<f2 BF16:<u2 U32:<u4 I32:<i4 F32:<f4 "
FORMS += "U64:<u8 I64:<i8 F64:<f8 C64:<c8"
DTYPES = dict(re.findall(r"(\w+):(\S+)", FORMS))
COMMIT = re.compile(r"step-(\d+)\.g(\d+)\.a(\d+)")
SEAL = re.compile(rb',"manifestDigest":"([0-9a-f]{32})"\}\n\Z')


class UnusableError(Exception):
    """The checkpoint is corrupt or has another format."""


def read_manifest(commit: Path) -> dict:
    raw = (commit / "MANIFEST.json").read_bytes()
    seal = SEAL.search(raw)
    if seal is None or xxhash.xxh3_128_hexdigest(raw[: seal.start()] + b"}").encode() != seal[1]:
        raise UnusableError(f"{commit.name}: the manifest is damaged")
    manifest = json.loads(raw)
    known = (manifest["format"], manifest["version"], manifest["digest"]["algorithm"])
    if known not in [("holdfast-checkpoint", version, "xxh3_128") for version in (1, 2, 3, 4)]:
        raise UnusableError(f"{commit.name}: {known} is not known here")
    return manifest


def read_file(commit: Path, name: str, manifest: dict) -> bytes:
    if not re.fullmatch(r"(step-\d+\.g\d+\.a\d+/)?rank-\d+\.(safetensors|json)", name):
        raise UnusableError(f"{name!r} is not the name of a shard")
    record, size = manifest["files"][name], manifest["digest"]["chunkBytes"]
    data = (commit.parent / name if "/" in name else commit / name).read_bytes()
    found = [xxhash.xxh3_128_hexdigest(data[at : at + size]) for at in range(0, len(data), size)]
    if len(data) != record["bytes"] or found != record["chunks"]:
        raise UnusableError(f"{commit.name}/{name} is damaged")
    return data


def read_tensors(commit: Path, manifest: dict) -> dict:
    files, tensors = {name: read_file(commit, name, manifest) for name in manifest["files"]}, {}
    for name, record in manifest["tensors"].items():
        tensors[name] = whole = np.empty(record["shape"], DTYPES[record["dtype"]])
        for part in record["chunks"]:
            box = tuple(slice(at, at + size) for at, size in zip(part["start"], part["shape"], strict=True))
            data = np.frombuffer(files[part["file"]][part["offset"] :][: part["bytes"]], whole.dtype)
            whole[box] = data.reshape(part["shape"])
        for patch in record.get("patches", []):
            raw, begin = files[patch["file"]], patch["start"][0] * whole[0].size
            places = np.frombuffer(raw, "<u4", patch["count"], patch["places"]).astype(int) + begin
            whole.reshape(-1)[places] = np.frombuffer(raw, whole.dtype, patch["count"], patch["values"])
    return tensors


def build(tree: object, tensors: dict) -> object:
    """Return a state dict from the tree of one object. Marks that a model's weights do not need stay unchanged."""
    if isinstance(tree, list):
        return [build(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree)) if len(tree) == 1 else ""
    if mark in ("$tensor", "$array", "$rows"):
        return tensors[tree[mark][0] if mark == "$rows" else tree[mark]]
    return {key: build(item, tensors) for key, item in tree.items()}


def readable(manifest: dict, claims: list) -> bool:
    """Return whether the job that claimed last may resume from this checkpoint."""
    if not claims:
        return True
    job = max(claims, key=attempt_id)["jobUID"]
    first = min(attempt_id(claim) for claim in claims if claim["jobUID"] == job)
    if manifest["jobUID"] != job and attempt_id(manifest) >= first:
        return False
    binding = (claim for claim in claims if claim["jobUID"] == job or attempt_id(claim) < first)
    return not any(attempt_id(manifest) < attempt_id(claim) and cut_off(manifest, claim) for claim in binding)


def cut_off(manifest: dict, claim: dict) -> bool:
    source = claim["fromPair"]
    return manifest["step"] > claim["fromStep"] or source is None or attempt_id(manifest) > attempt_id(source)


def attempt_id(document: dict) -> tuple:
    return document["generation"], document["attempt"]


def newest(root: Path) -> tuple:
    claims = [json.loads(path.read_bytes()) for path in (root / "claims").glob("*.json")]
    commits = [path for path in root.iterdir() if COMMIT.fullmatch(path.name) and (path / "MANIFEST.json").exists()]
    for commit in sorted(commits, key=lambda path: [int(n) for n in COMMIT.fullmatch(path.name).groups()])[::-1]:
        manifest = read_manifest(commit)
        if readable(manifest, claims):
            return commit, manifest
    raise UnusableError(f"{root} holds no commit that may be read")
