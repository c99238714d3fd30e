#!/usr/bin/env bash
# What is to be verified on a machine with a CUDA card, in stages of under ten minutes each; one table at the end.
#
#   scripts/gpu_check.sh tests|mnist|throughput|posterior|kappa|kappa:METHOD|all [--dry]
#
# tests       the tests that can run on the card, with BNN_DEVICE=cuda: the numbers of the CPU within stated tolerances
# mnist       KFAC Laplace of LeNet on MNIST in float32: factors with large null spaces, repairs told
# throughput  ResNet-18 in bf16: images a second of the runner and of a bare loop
# posterior   seconds and peak memory of each posterior on a ResNet-18 for CIFAR-10
# kappa       dyadic scores of each method on CIFAR-10 over three seeds; typed again it goes on where it stopped
#
# What it needs: python with torch and torchvision; PYTHON=... names one. Other packages may lie as wheels in the
# folder WHEELS=... (hydra-core, omegaconf, antlr4-python3-runtime, safetensors, ...): they are unpacked to a temporary
# folder, nothing is downloaded. Data: BNN_DATA_DIR=... with MNIST/raw and cifar-10-batches-py. BNN_DEVICE=cpu --dry
# tries every stage at tiny sizes and without data. Tables go to outputs/results/ (RESULTS=...).
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
