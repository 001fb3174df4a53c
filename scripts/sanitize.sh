#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run compute-sanitizer over small launches of every kernel, and print one verdict a run:
#
#   scripts/sanitize.sh           every kernel, then the first planted fault of the tool
#   scripts/sanitize.sh RUN...    only these runs of the four below
#   scripts/sanitize.sh faults [TOOL...]
#                                 no kernel, every planted fault on its own: which does
#                                 this version of the tool report?
#
#   memcheck        addresses
#   racecheck       shared memory between threads, asynchronous copies left out
#   racecheck-bulk  the same with asynchronous copies, which has known false positives
#   synccheck       barriers
#
#   PASS      nothing was reported but the planted fault and the false positives below
#   FAIL      something else was reported, or the results are wrong
#   UNPROVED  the tool missed the planted fault, so its silence shows nothing
#   TIMEOUT   not done within LIMIT seconds
#
# Exit status 0 only if every run says PASS, of `faults` if every tool reports its first.
# Needs a GPU. Settings: PYTHON, SANITIZER, LIMIT (seconds a run, 60), LOGS (a directory
# for the full reports). What is launched is in tests/verify_kernels/sanitize.py.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
SANITIZER=${SANITIZER:-/usr/local/cuda/bin/compute-sanitizer}
LIMIT=${LIMIT:-60}
LOGS=${LOGS:-$(mktemp -d)}
# Tool -> faults planted for it (tests/verify_kernels/planted/memory.py).
declare -A PLANTED=(
  [memcheck]="PastTheEnd"
  [racecheck]="NoBarrier"
  [synccheck]="LaneNotInTheMask HalfAWarpAtTheBarrier BarrierNotWaitedFor BarrierNotMade"
)

# Known false positives of a run: kernel and reason. What is listed is counted in the
# verdict and shown under it; it does not fail the run.
known() {
  case "$1 $2 $3" in
    "racecheck-bulk SkinnyGemmKernel "*)
      # The tool takes a raw cp.async.bulk for a write by the thread that issues it, and
      # does not take the mbarrier it completes on (other warps try_wait for it, in a
      # loop) for an order; flash-attention's AI/RACECHECK_TMA_HAZARD.md has a minimal
      # case. So this run cannot vouch for the ring: the 1,000 launches with equal bits
      # of tests/verify_kernels/test_skinny_gemm.py do.
      echo "raw cp.async.bulk completing on an mbarrier that other warps wait for" ;;
    *) return 1 ;;
  esac
}

# One line a report of LOG: "kernel class | what was reported", "?" without a kernel.
reports() {
  awk '
    function flush() {
      if (head != "" && head !~ /^(COMPUTE-SANITIZER|[A-Z]+ SUMMARY|LEAK SUMMARY)/)
        print (kernel == "" ? "?" : kernel) " | " head
      head = ""; kernel = ""
    }
    /^========= ?[^ =]/ { flush(); head = substr($0, 11) }
    /^=========/ && match($0, /kernel_cutlass[A-Za-z0-9_]*/) {
      name = substr($0, RSTART, RLENGTH)
      # Modules are in lower case, so the class begins at the first capital.
      if (match(name, /[A-Z][A-Za-z0-9]*_object/))
        kernel = substr(name, RSTART, RLENGTH - 7)
      else
        kernel = name
      gsub(/kernel_cutlass[A-Za-z0-9_]*/, kernel, head)
      if ($0 ~ /^=========  +and /) {
        line = $0
        gsub(/kernel_cutlass[A-Za-z0-9_]*/, kernel, line)
        sub(/^=========  +/, " ", line)
        head = head line
      }
    }
    /^=========[ ]*$/ { flush() }
    END { flush() }
  ' "$1"
}

# check TOOL BULK LOG ARGUMENT..: run tests/verify_kernels/sanitize.py under a tool.
check() {
  # The tools' own guess of the mbarriers of a CTA can be too low for dynamic shared
  # memory; no kernel has 64.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout --kill-after=5 "$LIMIT" \
    "$SANITIZER" --tool "$1" --check-bulk-copy "$2" --num-cuda-barriers 64 \
    --kernel-name kns=kernel_cutlass --show-backtrace no --report-api-errors no \
    --print-limit 1000 --destroy-on-device-error kernel \
    "$PYTHON" -m tests.verify_kernels.sanitize "${@:4}" > "$3" 2>&1
}

timed_out() { [ "$1" = 124 ] || [ "$1" = 137 ]; }

judge() {
  local run=$1 log=$2 status=$3 fault=$4 line kernel reason
  local planted=0 excused=0 bad="" listed=""
  if timed_out "$status"; then
    echo "$run: TIMEOUT after $LIMIT s ($log)"
    return 1
  fi
  if ! grep -q "^sanitize: results are right" "$log"; then
    echo "$run: FAIL, the program did not come to its end ($log)"
    grep -v '^=========  ' "$log" | tail -n 5
    return 1
  fi
  while IFS= read -r line; do
    kernel=${line%% | *}
    if [ "$kernel" = "$fault" ]; then
      planted=$((planted + 1))
    elif reason=$(known "$run" "$kernel" "$line"); then
      excused=$((excused + 1))
      listed+="  known: $line"$'\n'"         $reason"$'\n'
    else
      bad+="  $line"$'\n'
    fi
  done < <(reports "$log")
  if [ -n "$bad" ]; then
    echo "$run: FAIL ($log)"
    printf '%s' "$bad" | head -n 20
    printf '%s' "$listed"
    return 1
  fi
  if [ "$planted" = 0 ]; then
    echo "$run: UNPROVED, the planted fault was not reported ($log)"
    return 1
  fi
  echo "$run: PASS, planted fault reported, $excused known false positives ($log)"
  printf '%s' "$listed"
}

if [ ! -x "$(command -v "$SANITIZER")" ]; then
  echo "sanitize: $SANITIZER is missing; set SANITIZER to CUDA's compute-sanitizer" >&2
  exit 2
fi
mkdir -p "$LOGS"
failed=0
if [ "${1:-}" = faults ]; then
  shift
  for tool in ${@:-memcheck racecheck synccheck}; do
    for fault in ${PLANTED[$tool]}; do
      log=$LOGS/$tool-$fault.log
      check "$tool" no "$log" --only "$fault"
      status=$?
      found=$(reports "$log" | grep -m 1 "^$fault | ")
      if [ -n "$found" ]; then
        verdict="reported: ${found#* | }"
      else
        verdict="not reported"
        [ "$fault" = "${PLANTED[$tool]%% *}" ] && failed=1
      fi
      timed_out "$status" && verdict+=", TIMEOUT after $LIMIT s"
      echo "$tool $fault: $verdict ($log)"
    done
  done
  exit $failed
fi
for run in ${@:-memcheck racecheck racecheck-bulk synccheck}; do
  tool=${run%-bulk}
  bulk=yes
  [ "$run" = racecheck ] && bulk=no
  fault=${PLANTED[$tool]%% *}
  check "$tool" "$bulk" "$LOGS/$run.log" "$fault"
  judge "$run" "$LOGS/$run.log" $? "$fault" || failed=1
done
exit $failed
