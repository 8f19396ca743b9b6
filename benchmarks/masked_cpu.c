/* Answers the CPUID instruction without some of its bits, for libraries in which masked_cpu.py replaced each CPUID by an
 * undefined instruction: the kernel then raises SIGILL. Preloaded with LD_PRELOAD. MASKED_CPUID lists the bits to clear:
 * "leaf:subleaf:register:bits", numbers in hex, registers 0 to 3 for EAX to EDX, separated by commas. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

static struct { unsigned leaf, subleaf, reg, bits; } masks[64];
static int count;
static int (*real_sigaction)(int, const struct sigaction *, struct sigaction *);

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)regs[REG_RIP];
    if (at[0] != 0x0f || at[1] != 0x0a) { /* not ours: let it end the process */
        struct sigaction plain = {.sa_handler = SIG_DFL};
        real_sigaction(SIGILL, &plain, NULL);
        return;
    }
    unsigned leaf = regs[REG_RAX], subleaf = regs[REG_RCX], found[4];
    __cpuid_count(leaf, subleaf, found[0], found[1], found[2], found[3]);
    for (int i = 0; i < count; i++)
        if (masks[i].leaf == leaf && masks[i].subleaf == subleaf) found[masks[i].reg] &= ~masks[i].bits;
    regs[REG_RAX] = found[0];
    regs[REG_RBX] = found[1];
    regs[REG_RCX] = found[2];
    regs[REG_RDX] = found[3];
    regs[REG_RIP] += 2;
}

/* Python's faulthandler would take the signal. */
int sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    return number == SIGILL && action ? 0 : real_sigaction(number, action, before);
}

__attribute__((constructor)) static void start(void) {
    real_sigaction = dlsym(RTLD_NEXT, "sigaction");
    const char *text = getenv("MASKED_CPUID");
    while (text && *text && count < 64 &&
           sscanf(text, "%x:%x:%x:%x", &masks[count].leaf, &masks[count].subleaf, &masks[count].reg, &masks[count].bits) == 4) {
        count++;
        text = strchr(text, ',');
        text = text ? text + 1 : NULL;
    }
    struct sigaction ours = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    real_sigaction(SIGILL, &ours, NULL);
}
