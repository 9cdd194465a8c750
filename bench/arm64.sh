#!/usr/bin/env bash
# Run tests of a checkout as on a 64-bit ARM processor, emulated by qemu, on an x86-64 Debian.
#
#     bench/arm64.sh CHECKOUT [PYTEST-ARGUMENT ...]
#     bench/arm64.sh . tests/test_gradients.py -k float64 -x
#
# Another processor has other vector widths, other instructions and an LLVM of its own: what is
# wrong on ARM alone no test on x86-64 can show. Emulation tells whether results are right, never
# how fast they are; compiling takes some seven times as long as on x86-64, so name the tests.
# What the kernels compile to is kept in ARM64_WORK: a second run of the same sources is faster.
#
# Needs Debian 12, root, Linux 6.7 or newer (an older one with qemu registered for the
# whole machine, which Debian's binfmt-support does) and Python 3.11 or newer with pip; it installs
# qemu-user-static and mmdebstrap where they are missing. The checkout is mounted read-only.
#
#     ARM64_WORK  where all that is fetched and compiled lies (./build/arm64)
#     QEMU_CPU    the processor (neoverse-n1; `qemu-aarch64-static -cpu help` lists others)
#     NUMBA_*     reach the tests; nothing else of the environment does
set -euo pipefail

if [ $# -eq 0 ] || [ ! -f "$1/pyproject.toml" ]; then
    echo "usage: $0 CHECKOUT [PYTEST-ARGUMENT ...]" >&2
    exit 2
fi
checkout=$(realpath "$1")
shift
suite=bookworm # Python 3.11 and glibc 2.36
mkdir -p "${ARM64_WORK:-build/arm64}"
work=$(realpath "${ARM64_WORK:-build/arm64}")
root=$work/root-$suite

missing=()
command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
if [ ${#missing[@]} -gt 0 ]; then
    apt-get -qq update
    apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
fi

# Debian's Python and the libraries that wheels expect of a system. The packages are only unpacked:
# what they would run at their installation, no test needs.
if [ ! -e "$root/complete" ]; then
    rm -rf "$root"
    mmdebstrap --quiet --arch=arm64 --variant=extract --skip=check/qemu \
        --include=python3,libgomp1,libstdc++6,dash,coreutils "$suite" "$root"
    mkdir -p "$root"/{dev,etc,proc,sys,tmp,checkout,site,keep}
    echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
    echo 'root:x:0:' >"$root/etc/group"
    touch "$root/complete"
fi
python=$(basename "$(readlink "$root/usr/bin/python3")") # python3.11

# The wheels, fetched by this machine's pip for the other one, with every glibc up to the suite's.
# Of the checkout itself only the record that it is installed remains: its sources are run.
site=$work/site-$suite-$(sha256sum "$checkout/pyproject.toml" | cut -c1-16)
if [ ! -e "$site/complete" ]; then
    rm -rf "$site"
    platforms=(--platform manylinux2014_aarch64)
    for glibc in {17..36}; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
    python3 -m pip install -qq --disable-pip-version-check --root-user-action=ignore \
        --no-warn-conflicts --no-compile --target "$site" --only-binary=:all: \
        --implementation cp --python-version "${python#python}" "${platforms[@]}" \
        "${checkout}[test]"
    rm -rf "$site/nattn"
    touch "$site/complete"
fi

# LLVM asks /proc/cpuinfo, which qemu passes on from x86-64, for the processor and what it has.
# These are a Neoverse N1's lines (AWS Graviton2, Ampere Altra); for another QEMU_CPU LLVM is told
# nothing and compiles for any ARMv8.
export QEMU_CPU=${QEMU_CPU:-neoverse-n1}
: >"$work/cpuinfo"
for ((n = 0; n < $(nproc); n++)); do
    echo "processor	: $n"
    if [ "$QEMU_CPU" = neoverse-n1 ]; then
        echo "Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid" \
            "asimdrdm lrcpc dcpop asimddp ssbs"
        printf '%s\n' "CPU implementer	: 0x41" "CPU architecture: 8" "CPU variant	: 0x3" \
            "CPU part	: 0xd0c" "CPU revision	: 1"
    fi
    echo
done >>"$work/cpuinfo"

# Everything below happens in namespaces of its own, which end with the command: no mount is left
# behind, and qemu is registered for these processes alone, so that a test can start others.
mkdir -p "$work/keep/tmp"
export checkout root site work python
exec unshare --user --map-root-user --mount bash -s -- "$@" <<'INSIDE'
set -euo pipefail
for folder in dev proc sys; do mount --rbind "/$folder" "$root/$folder"; done
if mount -t binfmt_misc none "$root/proc/sys/fs/binfmt_misc" 2>/dev/null; then
    cat /usr/lib/binfmt.d/qemu-aarch64.conf >"$root/proc/sys/fs/binfmt_misc/register"
elif ! chroot "$root" /bin/true 2>/dev/null; then
    echo "this kernel runs no programs of arm64: install binfmt-support, or Linux 6.7" >&2
    exit 1
fi
mount --bind "$work/cpuinfo" "$root/proc/cpuinfo"
mount --bind "$work/keep" "$root/keep"
mount --bind "$work/keep/tmp" "$root/tmp"
mount --bind "$site" "$root/site"
mount --bind "$checkout" "$root/checkout"
mount -o remount,bind,ro "$root/checkout"
passed=()
for name in "${!NUMBA_@}"; do passed+=("$name=${!name}"); done
exec chroot "$root" /usr/bin/env -i -C /checkout "${passed[@]}" \
    HOME=/keep LANG=C.UTF-8 PATH=/usr/bin:/bin PYTHONPATH=/site PYTHONPYCACHEPREFIX=/keep/pyc \
    NATTN_CACHE_DIR=/keep/nattn HYPOTHESIS_STORAGE_DIRECTORY=/keep/hypothesis QEMU_CPU="$QEMU_CPU" \
    "$python" -m pytest -p no:cacheprovider "$@" </dev/null
INSIDE
