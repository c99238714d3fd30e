#!/usr/bin/env bash
# Checks on a machine with a CUDA GPU, in stages of under ten minutes each, with one table at the end.
#
#   scripts/gpu_check.sh tests|mnist|throughput|posterior|kappa|kappa:METHOD|all [--dry]
#
# tests       the tests that can run on the GPU, with BNN_DEVICE=cuda: the numbers of the CPU within stated tolerances
# mnist       KFAC Laplace of a LeNet on MNIST in float32: factors with large null spaces, and the repairs they need
# throughput  ResNet-18 in bf16: images per second of the runner and of a bare loop
# posterior   seconds and peak memory of each posterior of a ResNet-18 on CIFAR-10
# kappa       dyadic scores of each method on CIFAR-10 over three seeds; the same command resumes
#
# It needs a Python with torch and torchvision (PYTHON=... names one). The other packages may be wheels in the folder
# WHEELS=... (hydra-core, omegaconf, antlr4-python3-runtime, safetensors, ...); they are unpacked to a temporary folder
# and nothing is downloaded. Data: BNN_DATA_DIR=... with MNIST/raw and cifar-10-batches-py. BNN_DEVICE=cpu with --dry
# runs every stage at tiny sizes and without data files. Tables go to outputs/results/ (RESULTS=...).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [[ -n ${WHEELS:-} ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$WHEELS"/*.whl
    export PYTHONPATH=$PYTHONPATH:$work/site
fi
export BNN_DEVICE=${BNN_DEVICE:-cuda}
"$python" scripts/gpu_check.py "$@"
