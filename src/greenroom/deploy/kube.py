"""`greenroom generate kube`: an intent as files for Kubernetes, in one of three forms."""

from __future__ import annotations

from greenroom.deploy.helm import chart
from greenroom.deploy.intent import Files, Intent
from greenroom.deploy.kube_pod import KubeOptions
from greenroom.deploy.kustomize import kustomize, plain
from greenroom.deploy.unfit import Unfit

FORMATS = {"kustomize": kustomize, "helm": chart, "plain": plain}


def kube(intent: Intent, form: str = "kustomize", options: KubeOptions | None = None) -> Files:
    """The same bytes for the same intent; Unfit where it cannot be written."""
    if form not in FORMATS:
        raise Unfit(f"there is no form {form!r} for Kubernetes: it is one of {', '.join(FORMATS)}")
    return FORMATS[form](intent, options or KubeOptions.of(intent.options))
