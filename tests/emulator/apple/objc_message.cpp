// objc_msgSend: finds the method and jumps there with all that the caller gave. x86-64, System V.
asm(R"(
.text
.macro MESSAGE name self selector
.globl \name
.type \name,@function
\name:
  testq \self,\self
  jz 1f
  pushq %rbp
  movq %rsp,%rbp
  subq $192,%rsp
  movq %rdi,0(%rsp)
  movq %rsi,8(%rsp)
  movq %rdx,16(%rsp)
  movq %rcx,24(%rsp)
  movq %r8,32(%rsp)
  movq %r9,40(%rsp)
  movq %rax,48(%rsp)
  movups %xmm0,64(%rsp)
  movups %xmm1,80(%rsp)
  movups %xmm2,96(%rsp)
  movups %xmm3,112(%rsp)
  movups %xmm4,128(%rsp)
  movups %xmm5,144(%rsp)
  movups %xmm6,160(%rsp)
  movups %xmm7,176(%rsp)
  movq \selector,%rcx
  movq \self,%rdi
  movq %rcx,%rsi
  call objc_rt_lookup@PLT
  movq %rax,%r11
  movq 0(%rsp),%rdi
  movq 8(%rsp),%rsi
  movq 16(%rsp),%rdx
  movq 24(%rsp),%rcx
  movq 32(%rsp),%r8
  movq 40(%rsp),%r9
  movq 48(%rsp),%rax
  movups 64(%rsp),%xmm0
  movups 80(%rsp),%xmm1
  movups 96(%rsp),%xmm2
  movups 112(%rsp),%xmm3
  movups 128(%rsp),%xmm4
  movups 144(%rsp),%xmm5
  movups 160(%rsp),%xmm6
  movups 176(%rsp),%xmm7
  leave
  jmp *%r11
1:
  xorl %eax,%eax
  xorl %edx,%edx
  xorps %xmm0,%xmm0
  xorps %xmm1,%xmm1
  ret
.size \name,.-\name
.endm
MESSAGE objc_msgSend %rdi %rsi
MESSAGE objc_msgSend_fpret %rdi %rsi
MESSAGE objc_msgSend_stret %rsi %rdx
.globl __gnustep_objcxx_personality_v0
__gnustep_objcxx_personality_v0: jmp __gxx_personality_v0@PLT
)");
