"""The roles whose certificates may use a method of a worker, where it speaks TLS."""

from grpc_health.v1 import health

from protos import kv_pb2, worker_pb2
from services.tls.role_check import Allowed
from services.tls.roles import CertificateRole

_WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_CONTROL = kv_pb2.DESCRIPTOR.services_by_name["KvControl"].full_name
_BYTES = kv_pb2.DESCRIPTOR.services_by_name["KvBytes"].full_name

CALLERS: Allowed = {
    f"/{_WORKER}/Connect": {CertificateRole.GATEWAY},
    f"/{_WORKER}/Drain": {CertificateRole.GATEWAY, CertificateRole.OPERATOR},
    f"/{_CONTROL}/Pair": {CertificateRole.DECODE},
    f"/{_BYTES}/Read": {CertificateRole.DECODE},
    f"/{health.SERVICE_NAME}/Check": None,
    f"/{health.SERVICE_NAME}/Watch": None,
}
