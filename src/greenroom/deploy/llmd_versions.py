"""What the llm-d files are written for.  These projects move fast: look here first when something is refused."""

from __future__ import annotations

from collections.abc import Mapping

AS_OF = "2026-11"
VERSIONS: Mapping[str, str] = {
    "Gateway API CRDs": "v1.5.1",
    "Gateway API Inference Extension CRDs (InferencePool inference.networking.k8s.io/v1)": "v1.5.0",
    "llm-d router charts (llm-d-router-gateway, llm-d-router-standalone)": "v0",
    "llm-d payload-processor chart": "v0",
    "EndpointPickerConfig": "llm-d.ai/v1",
    "LeaderWorkerSet (leaderworkerset.x-k8s.io/v1)": "v0.7.0 or newer",
    "KEDA (keda.sh/v1alpha1)": "2.20",
    "Envoy": "1.33.2",
}
CHART_VERSION = "v0"
CHARTS = "oci://ghcr.io/llm-d/charts"
CRDS = (
    "https://github.com/kubernetes-sigs/gateway-api/releases/download/v1.5.1/standard-install.yaml",
    "https://github.com/kubernetes-sigs/gateway-api-inference-extension/releases/download/v1.5.0/v1-manifests.yaml",
)
EPP_IMAGE = "ghcr.io/llm-d/llm-d-router-endpoint-picker:main"
ENVOY_IMAGE = "docker.io/envoyproxy/envoy:distroless-v1.33.2"
EPP_CONFIG_API = "llm-d.ai/v1"
# What the charts ask for by default, for each base model; a graduate with one GPU a model pays it for each.
EPP_CPU = 8
EPP_MEMORY_GIB = 8
"""Requests of the endpoint picker by default, for each base model."""
STANDALONE_PROXY_CPU = 4
STANDALONE_PROXY_MEMORY_GIB = 8
GATEWAY_CLASSES: Mapping[str, str] = {
    "istio": "istio",
    "agentgateway": "agentgateway",
    "gke": "gke-l7-regional-external-managed",
}
