"""The Kubernetes manifests: valid by the schemas of its API, closed, and in agreement with images and settings."""

import copy
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_attn import __version__
from dist_attn.settings import Settings, read_settings
from dist_attn.shipped import DEFAULT_ENCODER
from tests.support.dockerfile import Image, read_dockerfile

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    document for name in KUSTOMIZATION["resources"] for document in yaml.safe_load_all((FOLDER / name).read_text())
]
LWS = ROOT / "deploy/kubernetes-lws"
OVERLAY: dict[str, Any] = yaml.safe_load((ROOT / "deploy/kubernetes-gpu/kustomization.yaml").read_text())
ALL_WORKLOADS = {item["metadata"]["name"]: item for item in OBJECTS if item["kind"] in ("Deployment", "StatefulSet")}
WORKLOADS = {name: ALL_WORKLOADS[name] for name in ("api", "engine", "encoder")}  # those with an image of ours
OLDEST, NEWEST = "1.29", "1.33"


def find(kind: str, name: str) -> dict[str, Any]:
    """One object."""
    (item,) = [item for item in OBJECTS if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return item


def pod(name: str) -> dict[str, Any]:
    """The pods of a workload."""
    spec: dict[str, Any] = ALL_WORKLOADS[name]["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    """The one container of a workload."""
    (only,) = pod(name)["containers"]
    return dict(only)


def settings_of(name: str) -> Settings:
    """What a container's variables make of the settings; unknown names are refused."""
    return read_settings(environment={item["name"]: item["value"] for item in container(name).get("env", [])}).settings


def image_of(name: str) -> Image:
    """The image of a workload."""
    return read_dockerfile(ROOT / "deploy" / container(name)["image"].replace("dist-attn-", "Dockerfile."))


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_the_schemas_accept_it(item: dict[str, Any]) -> None:
    """Every object is one of Kubernetes' API by its own schemas, without a field that they do not know."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate").validate
    for version in (OLDEST, NEWEST):
        assert validate(item, version, strict=True) == version


def test_the_schemas_refuse_what_is_wrong() -> None:
    """A misspelt field and a word for a number are found: the check above does check."""
    validation = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    policy = find("PodDisruptionBudget", "api")
    for spec in ({**policy["spec"], "minAvailble": 1}, {**policy["spec"], "selector": 1}):
        with pytest.raises(validation.ValidationError):
            validation.validate({**policy, "spec": spec}, NEWEST, strict=True)


def patched(item: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """The object after such operations of RFC 6902, as kustomize carries them out."""
    item = copy.deepcopy(item)
    for one in operations:
        *path, last = (part.replace("~1", "/") for part in one["path"].split("/")[1:])
        place: Any = item
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        assert (last in place) == (one["op"] == "replace"), one
        place[last] = one["value"]
    return item


def test_on_gpus_the_engine_has_one_for_each_rank() -> None:
    """The overlay is this folder with the image for GPUs, and an engine that the schemas accept with them."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate").validate
    assert OVERLAY["resources"] == [f"../{FOLDER.name}"]
    names = {image["name"]: image["newName"] for image in KUSTOMIZATION["images"] if "newName" in image}
    assert OVERLAY["images"] == [
        {"name": names["dist-attn-engine"], "newName": names["dist-attn-engine"] + "-gpu"},
    ]
    (patch,) = OVERLAY["patches"]
    engine = patched(find(patch["target"]["kind"], patch["target"]["name"]), yaml.safe_load(patch["patch"]))
    for version in (OLDEST, NEWEST):
        assert validate(engine, version, strict=True) == version
    (only,) = engine["spec"]["template"]["spec"]["containers"]
    assert f"--ranks={only['resources']['limits']['nvidia.com/gpu']}" in only["args"]
    assert only["resources"]["limits"]["memory"] == only["resources"]["requests"]["memory"]


def test_over_several_nodes_leader_and_workers_are_the_engine() -> None:
    """The overlay's pods are closed and started as the engine's; as many agents as pods, which look for the leader."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate").validate
    overlay = yaml.safe_load((LWS / "kustomization.yaml").read_text())
    assert {path.name for path in LWS.iterdir()} == {"kustomization.yaml", "engine.yaml"}
    assert overlay["images"] == [image for image in KUSTOMIZATION["images"] if image["name"] == "dist-attn-engine"]
    for patch in overlay["patches"][1:]:
        operations = yaml.safe_load(patch["patch"])
        if patch["target"]["kind"] == "Service":
            patched(find("Service", "engine"), operations)
        else:
            assert {one["path"] for one in operations} <= {"/spec/ingress/-", "/spec/egress/-"}
    template = yaml.safe_load((LWS / "engine.yaml").read_text())["spec"]["leaderWorkerTemplate"]
    pods = [template["leaderTemplate"], template["workerTemplate"]]
    leader, worker = (one["spec"]["containers"][0] for one in pods)
    for one in pods:
        metadata = {"name": "engine", **one["metadata"]}
        for version in (OLDEST, NEWEST):
            validate({"apiVersion": "v1", "kind": "Pod", **one, "metadata": metadata}, version, strict=True)
        assert one["metadata"]["labels"].items() >= find("Service", "engine")["spec"]["selector"].items()
        for key in ("securityContext", "automountServiceAccountToken", "terminationGracePeriodSeconds"):
            assert one["spec"][key] == pod("engine")[key]
        assert one["spec"]["containers"][0]["securityContext"] == container("engine")["securityContext"]
    for key in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert leader[key] == container("engine")[key]
    assert f"--agents={template['size']}" in leader["args"]
    own = next(word for word in leader["args"] if word.startswith("--rank-address="))
    assert own.replace("0.0.0.0", "$(LWS_LEADER_ADDRESS)") in worker["args"]
    assert worker["command"][1:] == [image_of("engine").last("ENTRYPOINT").split('"')[3], "agent"]


@pytest.mark.parametrize("name", ["kubernetes", "kubernetes-gpu", "kubernetes-lws"])
def test_kustomize_builds_what_the_schemas_accept(name: str) -> None:
    """Each patch finds its object; of another's API there is the LeaderWorkerSet alone, in the StatefulSet's place."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("needs kubectl, which has kustomize")
    validate = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate").validate
    built = subprocess.run([kubectl, "kustomize", ROOT / "deploy" / name], capture_output=True, text=True, timeout=60)
    assert (built.returncode, built.stderr) == (0, "")
    kinds = []
    for item in yaml.safe_load_all(built.stdout):
        if item["metadata"]["name"] == "engine":
            kinds.append(item["kind"])
        if item["kind"] != "LeaderWorkerSet":
            assert validate(item, NEWEST, strict=True) == NEWEST
    own = "LeaderWorkerSet" if name == LWS.name else "StatefulSet"
    assert sorted(kinds) == sorted([own, "NetworkPolicy", "PodDisruptionBudget", "Service"])


def test_all_parts_and_all_files_are_there() -> None:
    """Workloads, their services and budgets, the autoscaler and the policies; no manifest is left out; one version."""
    kinds = sorted(item["kind"] for item in OBJECTS)
    assert kinds == sorted(
        ["Namespace", "Deployment", "HorizontalPodAutoscaler", "PersistentVolumeClaim"]
        + ["StatefulSet"] * 3
        + ["Service"] * 4
        + ["PodDisruptionBudget"] * 4
        + ["NetworkPolicy"] * 5
    )
    assert {path.name for path in FOLDER.iterdir()} == {"kustomization.yaml", *KUSTOMIZATION["resources"]}
    images = {image["name"]: image["newTag"] for image in KUSTOMIZATION["images"]}
    redis = f"redis:{images.pop('redis')}"
    assert images == {container(name)["image"]: __version__ for name in WORKLOADS}
    assert redis == yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]["image"]


@pytest.mark.parametrize("name", ALL_WORKLOADS)
def test_every_pod_is_closed(name: str) -> None:
    """A user of its own, a root that is read-only, no capabilities, no token, bounded memory and disk."""
    spec, only = pod(name), container(name)
    user = int(image_of(name).last("USER").split(":")[0]) if name in WORKLOADS else 999  # redis, in its image
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert {spec["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {user}
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(only["resources"]["limits"]) >= {"memory", "ephemeral-storage"}
    assert set(only["resources"]["requests"]) >= {"cpu", "memory"}
    assert {mount["mountPath"] for mount in only["volumeMounts"]} >= (
        {"/data", "/tmp"} if name in WORKLOADS else {"/data"}
    )
    assert find("Namespace", KUSTOMIZATION["namespace"])["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/warn": "restricted",
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_commands_and_checks_are_those_of_the_images(name: str) -> None:
    """The flags are those that the image is tested with, scripts lie where it has them, ports are those it opens."""
    only, image = container(name), image_of(name)
    assert [word.split("=")[0] for word in only["args"]] == [
        word.split("=")[0] for word in image.command if word.startswith("--")
    ]
    assert [str(port["containerPort"]) for port in only["ports"]] == [image.last("EXPOSE")]
    for probe in (only["readinessProbe"], only["startupProbe"]):
        assert probe.get("exec", {"command": image.health_command})["command"] == image.health_command


def test_keys_come_from_a_secret_that_is_not_here() -> None:
    """No Secret lies in the folder; the API reads its keys from a mounted one, and does not start without it."""
    assert not [item for item in OBJECTS if item["kind"] == "Secret"]
    volumes = [volume for name in WORKLOADS for volume in pod(name)["volumes"] if "secret" in volume]
    assert not any(volume["secret"].get("optional") for volume in volumes)
    (volume,) = [volume for volume in pod("api")["volumes"] if volume["name"] == "keys"]
    (mount,) = [mount for mount in container("api")["volumeMounts"] if mount["name"] == volume["name"]]
    (item,) = volume["secret"]["items"]
    assert settings_of("api").http.api_keys_file == Path(mount["mountPath"]) / item["path"]


def test_engine_and_api_speak_with_keys() -> None:
    """Both look for them where they are mounted; the API gets its own and the controller's public key, no more."""
    for name in WORKLOADS:
        (mount,) = [mount for mount in container(name)["volumeMounts"] if mount["name"] == "engine-keys"]
        assert settings_of(name).engine.keys_dir == mount["mountPath"] and mount["readOnly"]
    (volume,) = [volume for volume in pod("api")["volumes"] if volume["name"] == "engine-keys"]
    assert {item["key"] for item in volume["secret"]["items"]} == {"api.secret", "controller.public"}


def test_probes_ask_what_they_should() -> None:
    """Alive by /livez, ready by /readyz, and not sooner unready than new requests are made to wait; the engine's
    ranks may take their time to start, and their restarts are the controller's, never Kubernetes'.
    """
    api, engine, settings = container("api"), container("engine"), settings_of("api")
    assert api["livenessProbe"]["httpGet"]["path"] == api["startupProbe"]["httpGet"]["path"] == "/livez"
    ready = api["readinessProbe"]
    assert ready["httpGet"]["path"] == "/readyz"
    assert ready["periodSeconds"] * ready["failureThreshold"] >= settings.waits.engine_ready_seconds
    start = engine["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] > settings.engine.start_deadline_s
    assert set(engine["livenessProbe"]) & {"exec", "httpGet"} == set()


def test_streams_may_end_after_sigterm() -> None:
    """The grace is waits.shutdown_seconds, with the pause before SIGTERM and 20 s of room; the engine drains too."""
    waits, engine = settings_of("api").waits, settings_of("engine").engine
    assert settings_of("encoder").engine == engine
    pause = int(container("api")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod("api")["terminationGracePeriodSeconds"] == pause + waits.shutdown_seconds + 20
    assert pod("encoder")["terminationGracePeriodSeconds"] == pod("engine")["terminationGracePeriodSeconds"]
    assert pod("engine")["terminationGracePeriodSeconds"] == engine.drain_s + 2 * engine.stop_deadline_s + 20
    assert engine.drain_s > 0
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert compose["api"]["stop_grace_period"] == f"{waits.shutdown_seconds + 20}s"
    assert compose["engine"]["stop_grace_period"] == f"{2 * engine.stop_deadline_s + 20:.0f}s"


def size_of(quantity: str) -> int:
    """Bytes of a quantity in Gi."""
    return int(quantity.removesuffix("Gi")) << 30


def test_disks_are_as_large_as_what_may_lie_there() -> None:
    """The pod's own volume holds limits.disk_bytes and its limit of disk the volume; the shared one files and jobs."""
    settings, volumes = settings_of("api"), {volume["name"]: volume for volume in pod("api")["volumes"]}
    size = size_of(volumes["data"]["emptyDir"]["sizeLimit"])
    assert settings.limits.disk_bytes < size < size_of(container("api")["resources"]["limits"]["ephemeral-storage"])
    claim = find("PersistentVolumeClaim", volumes["shared"]["persistentVolumeClaim"]["claimName"])["spec"]
    assert settings.files.all_bytes + settings.jobs.disk_bytes < size_of(claim["resources"]["requests"]["storage"])
    assert claim["accessModes"] == ["ReadWriteMany"]


def test_replicas_share_sessions_files_and_jobs() -> None:
    """States and catalogues are in Redis, each in a database of its own, bytes in the folders of the API for them."""
    api = settings_of("api")
    assert settings_of("engine").store.address == api.store.address  # states go between them by name
    addresses = [api.store.address, api.files.catalogue, api.jobs.address]
    (port,) = find("Service", "redis")["spec"]["ports"]
    assert addresses == [f"redis://redis:{port['port']}/{number}" for number in range(3)]
    shared = [mount for mount in container("api")["volumeMounts"] if mount["name"] == "shared"]
    assert {mount["mountPath"]: mount["subPath"] for mount in shared} == {"/data/files": "files", "/data/jobs": "jobs"}
    assert "--data-dir=/data" in container("api")["args"] and not api.files.folder


def test_redis_keeps_what_it_is_given() -> None:
    """It logs to a volume, throws nothing away, has room for the store's bytes, and API and engine alone reach it."""
    only, (claim,) = container("redis"), ALL_WORKLOADS["redis"]["spec"]["volumeClaimTemplates"]
    words = dict(pairwise(only["args"]))
    assert (words["--appendonly"], words["--maxmemory-policy"], words["--dir"]) == ("yes", "noeviction", "/data")
    assert words["--appendfsync"] == "always"
    memory = int(words["--maxmemory"].removesuffix("gb")) << 30
    assert settings_of("api").store.store_bytes < memory < size_of(only["resources"]["limits"]["memory"])
    assert {"name": claim["metadata"]["name"], "mountPath": "/data"} in only["volumeMounts"]
    labels = ALL_WORKLOADS["redis"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = find(kind, "redis")["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels
    policy = find("NetworkPolicy", "redis")["spec"]
    (rule,) = policy["ingress"]
    for peer, name in zip(rule["from"], ("api", "engine"), strict=True):
        labels = WORKLOADS[name]["spec"]["template"]["metadata"]["labels"]
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["egress"] == []


def test_services_autoscaler_and_budgets_point_at_the_workloads() -> None:
    """Each selector is the labels of the pods it means; the API asks for the engine by its Service's name and port."""
    for name, workload in WORKLOADS.items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"] == labels
        assert find("Service", name)["spec"]["selector"] == labels
        assert find("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == labels
        (port,) = find("Service", name)["spec"]["ports"]
        assert port["targetPort"] in {port["name"] for port in container(name)["ports"]}
    scaler = find("HorizontalPodAutoscaler", "api")["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "api"}
    assert "replicas" not in WORKLOADS["api"]["spec"]
    assert scaler["minReplicas"] > find("PodDisruptionBudget", "api")["spec"]["minAvailable"]
    for name in ("engine", "encoder"):
        assert WORKLOADS[name]["spec"]["serviceName"] == name
        assert find("Service", name)["spec"]["publishNotReadyAddresses"] is True
    assert "--api-address=tcp://engine:5555" in container("api")["args"]
    encoder = settings_of("api").encoder
    assert encoder.api_address == "tcp://encoder:5555" and encoder.model == DEFAULT_ENCODER
    assert f"--model={encoder.model}" in container("encoder")["args"]


@pytest.mark.parametrize("name", ["engine", "encoder"])
def test_only_the_api_reaches_an_engine(name: str) -> None:
    """Nothing is open that a policy does not name; an engine hears the API alone, and reaches no more than states."""
    everybody, engine, api = (find("NetworkPolicy", which)["spec"] for which in ("nobody", name, "api"))
    assert everybody == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    api_pods = WORKLOADS["api"]["spec"]["template"]["metadata"]["labels"]
    (rule,) = engine["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"].items() <= api_pods.items()
    assert rule["ports"] == [{"protocol": "TCP", "port": container(name)["ports"][0]["containerPort"]}]
    ports = [port["port"] for rule in engine["egress"] for port in rule["ports"]]
    assert ports == ([] if name == "encoder" else [6379, 53, 53])  # Redis, and the resolver of its name
    assert engine["podSelector"] in [peer.get("podSelector") for rule in api["egress"] for peer in rule["to"]]
    assert api["ingress"][0]["ports"] == [{"protocol": "TCP", "port": container("api")["ports"][0]["containerPort"]}]
