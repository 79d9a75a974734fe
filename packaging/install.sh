#!/bin/sh
# packaging/install.sh VENV REQUIREMENT: install REQUIREMENT (".", ".[test]") editable into a virtual environment.
# Can be interrupted and run again. PYTHON, CXX and TORCH (auto, cpu, cuda) choose; docs/development.md describes how.
set -eu
venv=$1 requirement=$2
python=${PYTHON:-python3}
settings="A proxy: HTTPS_PROXY; a mirror: PIP_INDEX_URL, or pip.conf."
cpu_index=https://download.pytorch.org/whl/cpu

fail() { echo "error: $*" >&2; exit 1; }
note() { echo "note: $*" >&2; }

# What is missing, before anything is downloaded.
command -v "$python" >/dev/null || fail "$python was not found. Debian: apt install python3-venv"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' ||
    fail "Foreword needs Python 3.11 to 3.14, $python is $("$python" -V 2>&1). Another one: make PYTHON=python3.12 ..."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python lacks its venv module. Debian: apt install $(basename "$python")-venv"
compiling="; last, the native kernels are compiled: minutes of CPU time, on all cores, with a spinner"
command -v "${CXX:-g++}" >/dev/null || {
    compiling=
    note "no C++ compiler (Debian: apt install g++), so no native kernels: torch computes instead," \
        "about 7 times slower (docs/lab/kernels.md). With a compiler, run the same command again."
}
torch=${TORCH:-auto}
case $torch in
auto) if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then torch=cuda; else torch=cpu; fi ;;
cpu | cuda) ;;
*) fail "TORCH=$torch is unknown: auto, cpu or cuda" ;;
esac

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || {
    echo "creating $venv"
    "$python" -m venv --clear "$venv"
}
# Warnings of build back ends are for packagers.
pip() { PYTHONWARNINGS=ignore "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
versions() { pip index versions torch --retries 0 "$@" 2>/dev/null || true; }

# pip prefers 2.13.0+cpu to 2.13.0, wherever they come from: an additional index is enough to get the CPU build.
set --
if [ $torch = cpu ] && ! "$venv/bin/python" -c 'import importlib.metadata; importlib.metadata.version("torch")' 2>/dev/null; then
    echo "no NVIDIA card: looking for a CPU build of PyTorch"
    case $(versions) in
    *+cpu*) ;; # pip's own settings have it
    "") fail "pip reaches no package index. $settings" ;;
    *) case $(versions --timeout 2 --index-url $cpu_index) in
        *+cpu*) set -- --extra-index-url $cpu_index ;;
        *) note "$cpu_index does not answer: pip's index may bring a CUDA build of several GB" ;;
        esac ;;
    esac
fi

echo "installing $requirement into $venv$compiling"
pip install --quiet --retries 0 --upgrade pip || true # for its progress bars
pip install --no-compile "$@" --editable "$requirement" ||
    fail "the installation failed, see pip's message above; the same command continues it. $settings"
