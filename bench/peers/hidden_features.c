// Preloaded into the process of an engine: its CPUID instructions fault, and are answered without the features that
// WEFT_BENCH_HIDDEN names ("avx512", "amx"). Threads that are started later inherit it. Linux on x86-64; the kernel says
// in /proc/cpuinfo whether CPUID can fault (cpuid_fault).

#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

static int hides_avx512, hides_amx;

static long set_cpuid(unsigned long works) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, works); }

static void answer(uint32_t leaf, uint32_t subleaf, uint32_t found[4]) {
    __asm__ volatile("cpuid" : "=a"(found[0]), "=b"(found[1]), "=c"(found[2]), "=d"(found[3]) : "a"(leaf), "c"(subleaf));
    if (leaf != 7) return;
    uint32_t *eax = &found[0], *ebx = &found[1], *ecx = &found[2], *edx = &found[3];
    if (hides_avx512 && subleaf == 0) {
        // F, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; 4VNNIW, 4FMAPS, VP2INTERSECT, FP16
        *ebx &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
        *ecx &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));
        *edx &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(23));
    }
    if (hides_avx512 && subleaf == 1) {
        // AVX-VNNI, AVX512-BF16, AVX-IFMA; AVX-VNNI-INT8, AVX-NE-CONVERT, AVX-VNNI-INT16, AVX10
        *eax &= ~(BIT(4) | BIT(5) | BIT(23));
        *edx &= ~(BIT(4) | BIT(5) | BIT(10) | BIT(19));
    }
    if (hides_amx && subleaf == 0) *edx &= ~(BIT(22) | BIT(24) | BIT(25));  // BF16, TILE, INT8
    if (hides_amx && subleaf == 1) *eax &= ~BIT(21), *edx &= ~BIT(8);       // FP16; COMPLEX
}

static void on_fault(int number, siginfo_t* info, void* context) {
    (void)info;
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    const uint8_t* code = (const uint8_t*)registers[REG_RIP];
    // Nothing else faults for a general-protection fault at these bytes: a page fault has trap number 14.
    if (registers[REG_TRAPNO] != 13 || code[0] != 0x0f || code[1] != 0xa2) {
        signal(number, SIG_DFL);  // the instruction is tried again, and ends the process
        return;
    }
    uint32_t found[4];
    set_cpuid(1);
    answer((uint32_t)registers[REG_RAX], (uint32_t)registers[REG_RCX], found);
    set_cpuid(0);
    registers[REG_RAX] = found[0];
    registers[REG_RBX] = found[1];
    registers[REG_RCX] = found[2];
    registers[REG_RDX] = found[3];
    registers[REG_RIP] += 2;
}

// Whether CPUID shows AVX-512 to this process: what its libraries see.
int weft_bench_shows_avx512(void) {
    uint32_t a = 7, b, c = 0, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (b & BIT(16)) != 0;
}

__attribute__((constructor)) static void hide(void) {
    const char* hidden = getenv("WEFT_BENCH_HIDDEN");
    if (!hidden) return;
    hides_avx512 = strstr(hidden, "avx512") != NULL;
    hides_amx = strstr(hidden, "amx") != NULL;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    if (sigaction(SIGSEGV, &action, NULL) == 0) set_cpuid(0);
}
