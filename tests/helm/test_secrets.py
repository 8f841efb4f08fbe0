"""Secrets: each that is named is there or is the user's own, and none is in a command line."""

import json
from collections.abc import Iterator
from pathlib import Path

from tests.helm.chart import (
    EVERYTHING,
    EXTERNAL_REDIS,
    KEYS,
    MTLS,
    Helm,
    Manifest,
    arguments_of,
    containers,
    environment_of,
    of_kind,
    workloads,
)
from tests.helm.test_chart import each_case

# Those of the cases that a user makes.
OWN = {"redis-url", "hub", "chat-tls", "baton-keys", "baton-test-key", "redis-password", "chat-example-com"}
OWN |= {f"{component}-mtls" for component in ("gateway", "prefill", "decode", "redis")}


def secrets_named(manifests: list[Manifest]) -> Iterator[tuple[str, set[str] | None]]:
    """Name and keys that pods take of it; None: whatever it has."""
    for pod, container in containers(manifests):
        for variable in environment_of(container):
            if source := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield source["name"], {source["key"]}
        for volume in pod.get("volumes", []):
            if "secret" in volume:
                yield volume["secret"]["secretName"], None
    for ingress in of_kind(manifests, "Ingress").values():
        for tls in ingress["spec"].get("tls", []):
            yield tls["secretName"], None


@each_case
def test_every_secret_is_rendered_or_made_by_cert_manager_or_ones_own(helm: Helm, case: Path | None):
    manifests = helm.render(case)
    made = {each["spec"]["secretName"] for each in of_kind(manifests, "Certificate").values()}
    rendered = {name: set(each["data"]) for name, each in of_kind(manifests, "Secret").items()}
    named = list(secrets_named(manifests))
    for name, keys in named:
        assert name in made | OWN or (keys or set()) <= rendered[name]
    assert {name for name, _ in named} - OWN - made == set(rendered)
    mounted = made - {f"{'chat' if case == EVERYTHING else 'demo-baton'}-{name}" for name in ("ca", "operator-mtls")}
    assert mounted <= {name for name, _ in named}


@each_case
def test_secrets_stay_out_of_command_lines(helm: Helm, case: Path | None):
    manifests = helm.render(case)
    for secret in of_kind(manifests, "Secret").values():
        for value in secret["data"].values():
            assert len(value) >= 32
            assert json.dumps(manifests).count(value) == 1
    for each in workloads(manifests):
        for _, container in containers([each]):
            passed = json.dumps([container.get("command"), container.get("args")])
            assert not [word for word in ("REDIS_PASSWORD", "REDIS_URL", "HF_TOKEN") if word in passed]


@each_case
def test_files_of_secrets_are_for_the_containers_user_alone(helm: Helm, case: Path | None):
    for pod, _ in containers(helm.render(case)):
        for volume in pod.get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
                assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_with_a_redis_of_ones_own_there_is_none_and_its_url_is_a_secret(helm: Helm):
    manifests = helm.render(EXTERNAL_REDIS)
    assert {container["name"] for _, container in containers(manifests)} == {"gateway", "prefill", "decode", "chat"}
    assert [named for named in secrets_named(manifests) if named[0] == "redis-url"] == [("redis-url", {"url"})] * 3
    assert set(of_kind(manifests, "Secret")) == {"demo-baton-api-key"}


def test_passwords_of_ones_own_replace_the_charts(helm: Helm):
    manifests = helm.render(EVERYTHING)
    keys = [keys for name, keys in secrets_named(manifests) if name == "redis-password"]
    assert sorted(map(str, keys)) == sorted(map(str, [{"gateway"}] * 2 + [{"worker"}] * 3))
    assert set(of_kind(manifests, "Secret")) == {"chat-api-key"}


def test_keys_come_from_a_file_or_the_chart_makes_one_or_there_are_none(helm: Helm):
    made, file, none = helm.render(), helm.render(KEYS), helm.render(None, "--set", "keys.allowAnonymous=true")
    assert "demo-baton-api-key" in of_kind(made, "Secret")
    assert "--keys=/etc/baton/keys/keys.json" in arguments_of(file, "gateway")
    assert "--allow-anonymous" in arguments_of(none, "gateway")
    assert not [key for key in of_kind(file, "Secret") | of_kind(none, "Secret") if "key" in key]
    for manifests in (made, file):
        assert "--allow-anonymous" not in arguments_of(manifests, "gateway")


def test_certificates_say_who_may_do_what(helm: Helm):
    certificates = of_kind(helm.render(MTLS), "Certificate")
    names = {name: each["spec"].get("dnsNames") for name, each in certificates.items()}
    redis = [f"demo-baton-redis{suffix}" for suffix in ("", ".default", ".default.svc", ".default.svc.cluster.local")]
    assert names == {
        "demo-baton-ca": None,
        "demo-baton-gateway-mtls": ["gateway.baton.internal"],
        "demo-baton-prefill-mtls": ["prefill.baton.internal", "worker.baton.internal"],
        "demo-baton-decode-mtls": ["decode.baton.internal", "worker.baton.internal"],
        "demo-baton-operator-mtls": ["operator.baton.internal"],
        "demo-baton-redis-mtls": redis,
        "demo-baton-tls": ["chat.example.com"],
    }
    issuers = {name: each["spec"]["issuerRef"]["name"] for name, each in certificates.items()}
    assert issuers.pop("demo-baton-tls") == "letsencrypt"
    assert issuers.pop("demo-baton-ca") == "demo-baton-self-signed"
    assert set(issuers.values()) == {"demo-baton-ca"}
    assert set(of_kind(helm.render(MTLS), "Issuer")) == {"demo-baton-ca", "demo-baton-self-signed"}


def test_with_certificates_of_ones_own_cert_manager_makes_those_that_are_left(helm: Helm):
    assert set(of_kind(helm.render(EVERYTHING), "Certificate")) == {"chat-ca", "chat-tls"}
    assert not of_kind(helm.render(EXTERNAL_REDIS), "Certificate")
    assert not of_kind(helm.render(EXTERNAL_REDIS), "Issuer")
